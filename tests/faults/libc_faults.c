/* Faults below a program, loaded in front of its C library:

   FAULT_CLOCK   a file that holds seconds: the wall clock is wrong by so much, from when it is written
   FAULT_DISK    a folder: after each fsync it gets a copy of that file, which is what a power cut would leave,
                 and loses the database's journals that were unlinked before

   Monotonic clocks are left alone, as a changed wall clock leaves them. */

#define _GNU_SOURCE
#include <dirent.h>
#include <dlfcn.h>
#include <fcntl.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

static long clock_error(void) {
    const char *path = getenv("FAULT_CLOCK");
    char text[32] = {0};
    if (path == NULL) return 0;
    int fd = syscall(SYS_openat, AT_FDCWD, path, O_RDONLY);
    if (fd < 0) return 0;
    if (read(fd, text, sizeof text - 1) < 0) text[0] = 0;
    close(fd);
    return atol(text);
}

int clock_gettime(clockid_t id, struct timespec *at) {
    int code = syscall(SYS_clock_gettime, id, at);
    if (code == 0 && (id == CLOCK_REALTIME || id == CLOCK_REALTIME_COARSE)) at->tv_sec += clock_error();
    return code;
}

int gettimeofday(struct timeval *restrict at, void *restrict zone) {
    int code = syscall(SYS_gettimeofday, at, zone);
    if (code == 0) at->tv_sec += clock_error();
    return code;
}

time_t time(time_t *at) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    if (at != NULL) *at = now.tv_sec;
    return now.tv_sec;
}

/* A journalling file system commits names in their order: what was unlinked before a sync does not come back after it. */
static void forget_what_is_gone(const char *folder, const char *origin) {
    char there[PATH_MAX], here[PATH_MAX];
    struct dirent *entry;
    DIR *kept = opendir(folder);
    if (kept == NULL) return;
    while ((entry = readdir(kept)) != NULL) {
        if (strncmp(entry->d_name, "muonscope.db-", 13) != 0) continue;
        if (snprintf(there, sizeof there, "%s/%s", origin, entry->d_name) >= (int)sizeof there) continue;
        if (snprintf(here, sizeof here, "%s/%s", folder, entry->d_name) >= (int)sizeof here) continue;
        if (access(there, F_OK) != 0) unlink(here);
    }
    closedir(kept);
}

static void keep_what_is_synced(int fd) {
    const char *folder = getenv("FAULT_DISK");
    char link[64], path[PATH_MAX], kept[PATH_MAX], beside[PATH_MAX + 8], block[65536];
    struct stat status;
    if (folder == NULL || fstat(fd, &status) != 0 || !S_ISREG(status.st_mode)) return;
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t length = readlink(link, path, sizeof path - 1);
    if (length < 0) return;
    path[length] = 0;
    if (snprintf(kept, sizeof kept, "%s/%s", folder, strrchr(path, '/') + 1) >= (int)sizeof kept) return;
    snprintf(beside, sizeof beside, "%s.new", kept);
    int to = open(beside, O_WRONLY | O_CREAT | O_TRUNC, 0600);
    if (to < 0) return;
    off_t at = 0;
    ssize_t got;
    while ((got = pread(fd, block, sizeof block, at)) > 0 && write(to, block, got) == got) at += got;
    close(to);
    rename(beside, kept);
    char *name = strrchr(path, '/');
    if (strncmp(name, "/muonscope.db", 13) != 0) return;
    *name = 0;
    forget_what_is_gone(folder, path);
}

int fsync(int fd) {
    int code = syscall(SYS_fsync, fd);
    if (code == 0) keep_what_is_synced(fd);
    return code;
}

int fdatasync(int fd) {
    int code = syscall(SYS_fdatasync, fd);
    if (code == 0) keep_what_is_synced(fd);
    return code;
}
