# Claude Code on one task, the first argument. Its standard input is empty, because what comes
# there becomes part of its prompt.
here=$(dirname "$0")
exec claude -p --permission-mode acceptEdits --allowedTools "Bash Edit Read Write" \
  --system-prompt-file "$here/prompt.md" -- "$1" </dev/null
