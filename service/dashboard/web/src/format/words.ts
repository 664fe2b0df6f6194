/** The system's words as they are shown: one place for labels, none for rules. */

const SENTENCES: Record<string, string> = {
  loss_scale_exhausted: "loss scale exhausted",
  no_progress: "no progress",
  task_error: "task error",
  config_refused: "configuration refused",
  worker_died: "worker died",
  worker_stalled: "worker stalled",
  out_of_memory: "out of memory",
  job_lost: "job lost",
  setup_failed: "set-up failed",
  record_incomplete: "record incomplete",
  disk_full: "disk full",
  checkpoint_unusable: "checkpoint unusable",
};

/** `worker_died` as "worker died". Unknown words pass through with spaces for underscores. */
export function words(name: string): string {
  return SENTENCES[name] ?? name.replaceAll("_", " ");
}

export function capitalised(text: string): string {
  return text.charAt(0).toUpperCase() + text.slice(1);
}

export const TERMINAL: ReadonlySet<string> = new Set(["succeeded", "failed", "stopped", "lost"]);
