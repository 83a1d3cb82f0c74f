# Each pod repeats this round: while it sees fewer than six healthy nodes, it meets every pod at its
# current address. When it sees all, the first pod assigns the slots, once; then each master without
# slots becomes a replica of its partner, three pods on. The argument is the pause between rounds,
# in seconds.
set -eu
# As process 1 a shell ignores the signals that it does not trap, and a pod waits for all containers.
trap 'exit 0' TERM INT
me=${HOSTNAME##*-}
of() { echo "seqgate-valkey-$1.seqgate-valkey"; }
ask() { pod=$1 && shift && timeout 3 valkey-cli -h "$(of "$pod")" "$@" 2>/dev/null | tr -d '\r'; }
round() {
  nodes=$(ask "$me" cluster nodes)
  if [ "$(echo "$nodes" | grep -cvE ' [^ ]*(handshake|fail|noaddr)[^ ]* ')" -lt 6 ]; then
    for pod in 0 1 2 3 4 5; do
      ip=$(getent hosts "$(of "$pod")" | cut -d ' ' -f 1)
      [ -z "$ip" ] || ask "$me" cluster meet "$ip" 6379
    done
    return
  fi
  slots=$(ask "$me" cluster info | sed -n 's/^cluster_slots_assigned://p')
  if [ "$slots" = 0 ] && [ "$me" = 0 ]; then
    ask 0 cluster addslotsrange 0 5460
    ask 1 cluster addslotsrange 5461 10922
    ask 2 cluster addslotsrange 10923 16383
  elif [ "$slots" = 16384 ] && echo "$nodes" | grep -qE ' myself,master ([^ ]+ ){4}connected$'; then
    ask "$me" cluster replicate "$(ask $(((me + 3) % 6)) cluster myid)"
  fi
}
while true; do
  round || true
  # In the background: a trap waits for a command, but not for `wait`.
  sleep "$1" &
  wait $!
done
