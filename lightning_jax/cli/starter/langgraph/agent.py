"""Starter agent in LangGraph that writes a time as HH:MM, and again if the form is wrong."""

import re
from typing import Any, Literal

import openai
from langchain_openai import ChatOpenAI
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.runtime import Runtime
from langgraph.types import Command

EXAMPLE = [("system", "Write the time as HH:MM."), ("user", "7:05 pm"), ("assistant", "19:05")]
FORM = re.compile(r"\s*(\d\d):(\d\d)\s*")


async def write(state: MessagesState, runtime: Runtime[ChatOpenAI]) -> dict[str, Any]:
    return {"messages": [await runtime.context.ainvoke(state["messages"])]}


def check(state: MessagesState) -> Command[Literal["write", "__end__"]]:
    is_right = FORM.fullmatch(str(state["messages"][-1].content))
    if is_right or len(state["messages"]) > 6:  # this was the second reply
        return Command(goto="__end__")
    return Command(goto="write", update={"messages": [("user", "Write HH:MM only.")]})


builder = StateGraph(MessagesState, context_schema=ChatOpenAI).add_node("write", write)
builder.add_node("check", check).add_edge(START, "write").add_edge("write", "check")
graph: Any = builder.compile()


async def run(task: dict[str, Any], llm: Any) -> float:
    """Return the reward: 0.2 for the form, and 0.4 each for the right hour and minute."""
    settings = {"base_url": llm.base_url, "api_key": llm.api_key, "model": llm.model}
    async with openai.DefaultAsyncHttpxClient() as http:
        chat = ChatOpenAI(**settings, http_async_client=http)
        final = await graph.ainvoke({"messages": [*EXAMPLE, ("user", task["text"])]}, context=chat)
    match = FORM.fullmatch(str(final["messages"][-1].content))
    hour, minute = task["time"].split(":")
    return 0.2 + 0.4 * (match[1] == hour) + 0.4 * (match[2] == minute) if match else 0.0
