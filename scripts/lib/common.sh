# Shared by the scripts; sourced, never run. Sets: ROOT (the clone), CACHE, VENV.
set -euo pipefail
ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
CACHE=${DSEC_CACHE:-/var/cache/dsec}
VENV=${DSEC_VENV:-$ROOT/.venv}
export DSEC_CACHE=$CACHE

say() { printf '%s\n' "$*" >&2; }
die() { say "error: $*"; exit 1; }

# What stands at the head of a script, without its `#`.
usage() { sed -n '2,/^\./{/^#/s/^# \{0,1\}//p}' "$0"; }
# Wrong usage: nothing is done.
misused() { say "error: $*"; usage >&2; exit 2; }

now_ms() { date +%s%3N; }

# step NAME COMMAND...: says its name, runs it, says how long it took; its output is shown only when it fails.
step() {
  local name=$1 began log status=0
  shift
  began=$(now_ms)
  # Without a name: whatever ends us, nothing is left of it.
  log=$(mktemp)
  exec 8<>"$log"
  rm -f "$log"
  # Before it: some take minutes, and nobody should have to look for what hangs.
  printf '  %-34s ' "$name" >&2
  (while sleep 10 && kill -0 $$ 2>/dev/null; do printf . >&2; done) 8>&- &
  local ticker=$!
  # Not in a condition: there "set -e" would not hold inside the function.
  set +e
  (set -e; exec 8>&-; "$@") >&8 2>&1
  status=$?
  kill "$ticker" 2>/dev/null
  wait "$ticker" 2>/dev/null
  set -e
  printf '%7.1f s\n' "$(awk "BEGIN { print ($(now_ms) - $began) / 1000 }")" >&2
  if [ "$status" -ne 0 ]; then
    say "--- $name failed with exit status $status; its last lines:"
    tail -n 40 /dev/fd/8 >&2
    exit "$status"
  fi
  exec 8>&-
}

need_root() { [ "$(id -u)" = 0 ] || die "$(basename "$0") must run as root (it installs packages and makes sandboxes)"; }

# lock NAME: one at a time, by a file in the cache; ends with the process, however that ends, or with `unlock`.
lock() {
  mkdir -p "$CACHE/locks"
  exec 9>"$CACHE/locks/$1"
  flock -n 9 || { say "  waiting for another set-up ($1)"; flock 9; }
}
unlock() { exec 9>&-; }

os_id() { (. /etc/os-release && printf '%s-%s' "$ID" "${VERSION_ID:-}"); }

missing_packages() {
  local package
  for package in "$@"; do
    # "installed" also for what only provides the name, such as a virtual package.
    [ "$(dpkg-query -W -f='${db:Status-Status}' "$package" 2>/dev/null)" = installed ] || printf '%s ' "$package"
  done
}

# apt_install PACKAGE...: only what is missing; nothing is asked of the network when nothing is.
apt_install() {
  local missing
  missing=$(missing_packages "$@")
  [ -n "$missing" ] || return 0
  export DEBIAN_FRONTEND=noninteractive
  dpkg --configure -a # an interrupted run may have left packages half installed
  apt-get update
  # What a package would start (a docker daemon with its bridge and firewall rules) nobody has asked for here.
  local policy=/usr/sbin/policy-rc.d kept=
  if [ -e "$policy" ]; then kept=1; else printf '#!/bin/sh\nexit 101\n' >"$policy" && chmod +x "$policy"; fi
  local done=0
  # shellcheck disable=SC2086 # a list of package names
  apt-get install -y --no-install-recommends $missing || done=$?
  [ -n "$kept" ] || rm -f "$policy"
  return "$done"
}

version_at_least() { [ "$(printf '%s\n%s\n' "$2" "$1" | sort -V | head -n 1)" = "$2" ]; }
