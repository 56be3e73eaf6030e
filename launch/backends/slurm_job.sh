# Parts of the batch script that `megalite slurm` writes. slurm.py replaces each @{name} and joins the parts that a job needs.

#: settings
run_dir=@{run_dir}
first_code="$run_dir/.first_code"  # exit code of the first rank that failed
distribution=block  # of srun's tasks over hosts
unset @{unset}
@{exports}
# no code from the current folder, where Python looks first, nor from one relative to it or empty in PYTHONPATH
if [[ -n ${PYTHONPATH:-} && ":$PYTHONPATH:" =~ :([^/:][^:]*)?: ]]; then
    echo "megalite: warning: empty and relative entries of PYTHONPATH are left out: write full paths" >&2
fi
PYTHONPATH=$(tr : '\n' <<< @{checkout}":$PYTHONPATH" | grep ^/ | paste -sd :)
export PYTHONPATH PYTHONSAFEPATH=1

#: rank
# Slurm sends these to the ranks too, which save and end; this script and the supervisor wait for them
trap '' TERM USR1 USR2 HUP

newest() { cat "$run_dir/checkpoints/latest" 2> /dev/null; }
before=$(newest)

rank() {
    trap '' TERM USR1 USR2 HUP
    @{rank_command}
    local code=$?
    [ "$code" -eq 0 ] || (set -o noclobber; echo "$code" > "$first_code") 2> /dev/null
    exit "$code"
}

#: srun
# a site may have changed the defaults of these options, and srun does not inherit --cpus-per-task from sbatch
start_ranks() {
    srun --nodes=@{nodes} --ntasks=@{ranks} --ntasks-per-node=@{ranks_per_node}@{cpus_per_rank} \
        --distribution="$distribution" \
        --mpi=none --export=ALL --kill-on-bad-exit=1 --wait=0 \
        bash -c rank
}
export -f rank

#: torchrun
# on SIGTERM torchrun would kill ranks that take over 30 s to save, so it handles SIGINT alone
ranks_of_host() {
    trap '' TERM USR1 USR2 HUP
    exec @{torchrun} --max-restarts=0 --nproc-per-node=@{ranks_per_node} \
        --nnodes=@{nodes} --node-rank="$SLURM_PROCID" --master-addr="$MASTER_ADDR" \
        --master-port=$((@{first_port} + (16 * SLURM_JOB_ID + SLURM_STEP_ID) % @{ports})) \
        --signals-to-handle=SIGINT --no-python bash -c rank
}
start_ranks() {
    srun --nodes=@{nodes} --ntasks=@{nodes} --ntasks-per-node=1@{cpus_per_host} --cpu-bind=none \
        --distribution="$distribution" \
        --mpi=none --export=ALL --kill-on-bad-exit=1 --wait=0 \
        bash -c ranks_of_host
}
export MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
export -f rank ranks_of_host

#: attempt
about_job() { scontrol show job "$SLURM_JOB_ID"; }
state_in() { sed -n 's/^ *JobState=\([^ ]*\) Reason=\([^ ]*\).*/\1 \2/p' <<< "$1"; }

attempt() {
    local state step code
    state=$(state_in "$(about_job)")
    if [[ -n $state && $state != "RUNNING "* ]]; then
        exit @{interrupted}  # Slurm is about to end the job
    fi
    # a step whose srun was killed keeps running, and holds its devices
    for step in $(squeue --noheader --steps --jobs="$SLURM_JOB_ID" --format=%i | grep '[.][0-9][0-9]*$'); do
        scancel --quiet --signal=KILL "$step"
    done
    rm -f "$first_code"
    start_ranks
    code=$?
    # when a rank fails, srun ends the others and returns the highest of all codes; the first one counts
    [ -s "$first_code" ] && code=$(< "$first_code")
    exit "$code"
}
export run_dir first_code distribution
export SLURM_KILL_BAD_EXIT=1  # so that ranks know, too, that srun ends them all when one fails
export -f about_job state_in start_ranks attempt

#: requeue
say() { echo "megalite: job $SLURM_JOB_ID $*"; }

requeue() {
    local try
    for try in 1 2 3 4 5; do
        if scontrol requeue "$SLURM_JOB_ID" || [[ $(state_in "$(about_job)") == "PENDING "* ]]; then
            say "goes back to the queue: $1"
            return
        fi
        sleep 5
    done
    say "could NOT be put back into the queue ($1): submit it again, the run goes on where it is saved"
}

say "on $SLURM_JOB_NODELIST, start $((${SLURM_RESTART_COUNT:-0} + 1))"

#: place
# place ranks with much traffic on neighbouring hosts; each start of the job has other hosts
place() {
    @{megalite} place @{arguments} \
        --names --nodes "$SLURM_JOB_NODELIST:@{ranks_per_node}" --topology /dev/stdin
}
if ! topology=$(scontrol show topology | grep -E '^(Switch|Block)Name='); then
    say "ranks in Slurm's order of hosts, which tells no topology"
elif ! names=$(place <<< "$topology") || [ "$(wc -l <<< "$names")" -ne @{ranks} ] \
    || ! @{per_task} <<< "$names" > "$run_dir/.task_hosts"; then
    say "ranks in Slurm's order of hosts: none could be found by its topology"
else
    export SLURM_HOSTFILE="$run_dir/.task_hosts" MASTER_ADDR="${names%%$'\n'*}"
    distribution=arbitrary
    say "ranks, by Slurm's topology, in this order of hosts:" $(uniq <<< "$names")
fi

#: supervise
@{megalite} supervise --restarts @{restarts} \
    --run-dir "$run_dir" -- bash -c attempt
code=$?

if [ "$code" -eq @{preempted} ]; then
    job=$(about_job)
    state=$(state_in "$job")
    if [[ $state != "RUNNING "* && $state != *" TimeLimit" ]]; then
        say "was cancelled, or goes back to the queue without our help: ${state:-its state is not known}"
    elif grep -q ' Requeue=0 ' <<< "$job"; then
        say "ends here, saved: its Requeue is 0"
    elif [ "$(newest)" = "$before" ] && ! grep -q ' PreemptTime=[0-9]' <<< "$job"; then
        say "is NOT put back into the queue: it was asked to end before one step was done; give it more --time"
    else
        requeue "asked to end, and saved"
    fi
fi
exit "$code"
