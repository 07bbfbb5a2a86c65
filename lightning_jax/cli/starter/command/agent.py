"""Starter agent as a program, here in plain Python. Make it yours, in any language.

A task comes as JSON on standard input, the policy's URL in the environment. The last line of output
is the reward.
"""

import json
import os
import re
import sys
import urllib.request

EXAMPLE = [
    {"role": "system", "content": "Write the price as CODE 0.00."},
    {"role": "user", "content": "7 dollars and 5 cents"},
    {"role": "assistant", "content": "USD 7.05"},
]

task = json.load(sys.stdin)
body = {
    "model": os.environ["OPENAI_MODEL"],
    "messages": [*EXAMPLE, {"role": "user", "content": task["text"]}],
    "max_tokens": 12,
}
request = urllib.request.Request(
    os.environ["OPENAI_BASE_URL"] + "/chat/completions",
    json.dumps(body).encode(),
    {
        "Authorization": f"Bearer {os.environ['OPENAI_API_KEY']}",
        "Content-Type": "application/json",
    },
)
with urllib.request.urlopen(request) as response:
    reply = json.load(response)["choices"][0]["message"]["content"]

# 0 for another form, else 0.2, 0.3 for the right currency and 0.5 for the right number.
match = re.fullmatch(r"([A-Z]{3}) (\d+\.\d\d)", reply.strip())
currency, number = task["price"].split()
reward = 0.2 + 0.3 * (match[1] == currency) + 0.5 * (match[2] == number) if match else 0.0
sys.stdout.write(f"{reply}\n{reward}\n")
