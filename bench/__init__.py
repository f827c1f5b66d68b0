"""Benches: each measures one part of verl_mux. Run from a checkout as `verl-mux bench NAME`; no wheel holds this package.

Runs on the command line; read by verl_mux/cli.py; imports nothing until a bench runs.
"""

# name -> (module, function, one line of help); the module is imported when the command runs or asks for its own --help.
BENCHES = {
    "mux": ("bench.mux", "bench_mux", "Two jobs: one after the other, uncoordinated, interleaved."),
    "hostile": ("bench.hostile", "bench_hostile", "Malformed frames and hostile messages at a coordinator."),
    "load": ("bench.load", "bench_load", "Hundreds of jobs at one coordinator."),
    "leases": ("bench.leases", "bench_leases", "Hand-over of a node between two jobs: release to grant."),
    "filler": ("bench.filler", "bench_filler", "Fillers beside two jobs: what they cost, and what they use."),
    "chaos": ("bench.chaos.chaos_bench", "bench_chaos", "Leases while processes, connections and disks fail."),
    "scheduler": ("bench.scheduler", "bench_scheduler", "Placement decisions among many running jobs."),
    "log": ("bench.log_cost", "bench_log", "The event log: microseconds an event, percent of a real step."),
    "memory": ("bench.memory", "bench_memory", "Sleep and wake of a real engine: tokens, bytes, and time."),
    "rollout": ("bench.rollouts.rollout", "bench_rollout", "Over-sampling and segments beside plain steps, on real jobs."),
    "migration": ("bench.rollouts.migration", "bench_migration", "Long-tail migration beside none, on two real jobs."),
    "predictor": ("bench.rollouts.predictor", "bench_predictor", "Length predictors on a file of prompts and lengths."),
    "sync": ("bench.sync.sync_bench", "bench_sync", "Weight syncs over shaped links, by every way and by the chosen one."),
}
GROUPS = {"bench": (BENCHES, "Measure one part, with the figure as JSON.")}
