"""Starter agent that works in a shell: a program that runs in the sandbox. Make it yours.

It needs no package. The instruction comes as JSON on standard input, the policy's URL in the
environment. What it leaves in the directory is tested when it ends.
"""

import json
import os
import re
import subprocess
import sys
import urllib.request

MAX_TURNS, MAX_CHARS = 4, 1000
SYSTEM = "Reply with one shell command in ```bash marks. When the task is done, reply DONE."
HEADERS = {
    "Authorization": f"Bearer {os.environ['OPENAI_API_KEY']}",
    "Content-Type": "application/json",
}
messages = [
    {"role": "system", "content": SYSTEM},
    {"role": "user", "content": "Write the word hello to greeting.txt."},
    {"role": "assistant", "content": "```bash\necho hello > greeting.txt\n```"},
    {"role": "user", "content": "(no output)"},
    {"role": "assistant", "content": "DONE"},
    {"role": "user", "content": json.load(sys.stdin)["instruction"]},
]
for _ in range(MAX_TURNS):
    body = json.dumps({"model": os.environ["OPENAI_MODEL"], "messages": messages}).encode()
    url = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
    with urllib.request.urlopen(urllib.request.Request(url, body, HEADERS)) as response:
        reply = json.load(response)["choices"][0]["message"]["content"] or ""
    match = re.search(r"```(?:bash|sh)?\n(.*?)```", reply, re.DOTALL)
    if match is None:
        break
    done = subprocess.run(["sh", "-c", match[1]], capture_output=True, text=True, errors="replace")
    output = (done.stdout + done.stderr)[-MAX_CHARS:] or "(no output)"
    messages += [{"role": "assistant", "content": reply}, {"role": "user", "content": output}]
