#!/bin/sh
# An agent as a shell script: curl asks for a sum, python3 writes and reads the JSON.
#
#     OPENAI_BASE_URL=http://127.0.0.1:8000/v1 sh agents/any_program/ask.sh "What is 17 + 25?"
#
# As a rollout's program it finds the task, a JSON object with `question`, on its standard input.
set -eu

if [ "${1-}" = --help ] || [ -z "${OPENAI_BASE_URL-}" ]; then
    echo "usage: OPENAI_BASE_URL=URL [OPENAI_API_KEY=KEY] [OPENAI_MODEL=NAME] ask.sh [QUESTION]"
    [ "${1-}" = --help ] && exit 0 || exit 2
fi

body=$(python3 -c '
import json, os, sys

question = sys.argv[1] if len(sys.argv) > 1 else json.load(sys.stdin)["question"]
messages = [
    {"role": "system", "content": "You add numbers. Reply with one line: Answer: NUMBER"},
    {"role": "user", "content": "What is 2 + 3?"},
    {"role": "assistant", "content": "Answer: 5"},
    {"role": "user", "content": question},
]
model = os.environ.get("OPENAI_MODEL", "policy")
print(json.dumps({"model": model, "messages": messages, "max_tokens": 32}))
' "$@")

answer=$(printf '%s' "$body" | curl --silent --show-error --fail --data-binary @- \
    --header "Content-Type: application/json" \
    --header "Authorization: Bearer ${OPENAI_API_KEY-none}" \
    "$OPENAI_BASE_URL/chat/completions")

printf '%s' "$answer" | python3 -c '
import json, sys

print(json.load(sys.stdin)["choices"][0]["message"]["content"])
'
