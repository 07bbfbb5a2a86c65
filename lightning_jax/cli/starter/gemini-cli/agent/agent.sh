# Gemini CLI on one task, the first argument. Its standard input is empty, because what comes there
# becomes part of its prompt. -m ends the side call that chooses a model for each prompt.
here=$(dirname "$0")
mkdir -p ~/.gemini
cp "$here/settings.json" ~/.gemini/
export GEMINI_SYSTEM_MD="$here/prompt.md"
exec gemini --skip-trust --yolo -m policy -p "$1" </dev/null
