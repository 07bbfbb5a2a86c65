"""MCP server over standard input and output, in plain Python: a registry of capitals.

It greets on its output first, as some servers do, lists its tools on two pages, and pings.
"""

import json
import os
import sys
import time

CAPITALS = {"France": "Paris", "Japan": "Tokyo", "Peru": "Lima", "Kenya": "Nairobi"}
COUNTRY = {"country": {"type": "string"}}
TOOLS = {
    "capital.of": {
        "description": "Return the capital of a country.\nNo others.",
        "inputSchema": {"type": "object", "properties": COUNTRY, "required": ["country"]},
    },
    "note": {"inputSchema": {"type": "object", "properties": {"text": {"type": "string"}}}},
}


def send(message: dict) -> None:
    sys.stdout.write(json.dumps({"jsonrpc": "2.0"} | message) + "\n")
    sys.stdout.flush()


def call(name: str, arguments: dict) -> dict:
    country = arguments.get("country", "")
    if country == "crash":
        sys.stderr.write("out of\x1b[2J ink\n")
        os._exit(3)
    if country == "hang":
        time.sleep(1000)
    if name == "note":
        resource = {"type": "resource", "resource": {"uri": "a:b", "text": "kept"}}
        return {"content": [{"type": "image", "data": "", "mimeType": "image/png"}, resource]}
    text = CAPITALS.get(country, f"there is no country {country!r}")
    return {"content": [{"type": "text", "text": text}], "isError": country not in CAPITALS}


def main() -> None:
    sys.stdout.write("capitals 1.0\n\n")
    for line in sys.stdin:
        message = json.loads(line)
        method, params = message.get("method"), message.get("params", {})
        if method == "initialize":
            send({"id": "p", "method": "ping"})
            send({"id": message["id"], "result": {"protocolVersion": params["protocolVersion"]}})
        elif method == "tools/list":
            name = params.get("cursor", next(iter(TOOLS)))
            after = [*TOOLS, None][[*TOOLS].index(name) + 1]
            tools = [{"name": name, **TOOLS[name]}]
            send({"id": message["id"], "result": {"tools": tools, "nextCursor": after}})
        elif method == "tools/call":
            if params["name"] in TOOLS:
                send({"id": message["id"], "result": call(params["name"], params["arguments"])})
            else:
                send({"id": message["id"], "error": {"code": -32602, "message": "no such tool"}})


if __name__ == "__main__":
    main()
