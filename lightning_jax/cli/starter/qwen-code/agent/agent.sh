# Qwen Code on one task, the first argument. Its standard input is empty, because what comes there
# becomes part of its prompt. --bare leaves out what it looks up when it starts.
here=$(dirname "$0")
exec qwen --bare --yolo --system-prompt "$(cat "$here/prompt.md")" -p "$1" </dev/null
