#!/bin/sh
# Draw the secrets of docker-compose.yml into deploy/secrets, one a file. What is there already stays.
set -eu
folder="${1:-$(dirname "$0")/secrets}"
mkdir -p "$folder"
# Nobody else comes this far. The files themselves are mounted into containers whose users have other numbers.
chmod 700 "$folder"

draw() { # name prefix
    file="$folder/$1"
    if [ -s "$file" ]; then
        echo "$file stays as it is"
        return
    fi
    printf '%s%s' "$2" "$(od -An -N32 -tx1 /dev/urandom | tr -d ' \n')" >"$file.new"
    chmod 444 "$file.new"
    mv "$file.new" "$file"
    echo "$file is new"
}

draw database_password ''
draw ray_token ''
draw admin_token msc_
draw jobs_token msc_
draw prometheus_token msc_
draw grafana_password ''
