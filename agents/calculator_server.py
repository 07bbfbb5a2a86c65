"""MCP server over stdio with a calculator. It ends when its input closes.

    python agents/calculator_server.py

It has one tool, `calculator(expression)`: arithmetic within the bounds of arithmetic.py.
"""

import sys
from pathlib import Path

import anyio
from mcp.server.lowlevel import Server
from mcp.server.stdio import stdio_server
from mcp.types import CallToolResult, TextContent, Tool

sys.path.insert(0, str(Path(__file__).parent))
from arithmetic import ArithmeticFault, calculate

TOOL = Tool(
    name="calculator",
    description="Computes arithmetic.",
    inputSchema={
        "type": "object",
        "properties": {"expression": {"type": "string"}},
        "required": ["expression"],
    },
)


def answer(arguments: dict[str, object]) -> CallToolResult:
    """Return the value as text, or the error in the expression."""
    try:
        text, wrong = calculate(str(arguments["expression"])), False
    except ArithmeticFault as fault:
        text, wrong = f"Error: {fault}", True
    return CallToolResult(content=[TextContent(type="text", text=text)], isError=wrong)


async def main() -> None:
    server: Server = Server("calculator")

    @server.list_tools()
    async def list_tools() -> list[Tool]:
        return [TOOL]

    @server.call_tool()
    async def call_tool(name: str, arguments: dict[str, object]) -> CallToolResult:
        if name != TOOL.name:
            raise ValueError(f"there is no tool {name!r}; expected {TOOL.name!r}")
        return answer(arguments)

    async with stdio_server() as (read, write):
        await server.run(read, write, server.create_initialization_options())


if __name__ == "__main__":
    anyio.run(main)
