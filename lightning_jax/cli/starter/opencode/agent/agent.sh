# OpenCode on one task, the first argument. Its standard input is empty, because what comes there
# becomes part of its prompt.
export OPENCODE_CONFIG="$(dirname "$0")/opencode.json"
exec opencode run -- "$1" </dev/null
