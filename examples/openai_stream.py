"""Streams a chat from a running fleet with the `openai` client (`pip install openai`).

usage: python examples/openai_stream.py [URL] [QUESTION]
"""

from __future__ import annotations

import sys

from openai import OpenAI, OpenAIError


def main() -> None:
    url = (sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000").rstrip("/").removesuffix("/v1")
    question = sys.argv[2] if len(sys.argv) > 2 else "What is the capital of France?"
    client = OpenAI(base_url=f"{url}/v1", api_key="none")
    model = client.models.list().data[0].id
    stream = client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": question}],
        max_tokens=64,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
    )
    for event in stream:
        if event.choices:
            print(event.choices[0].delta.content or "", end="", flush=True)
        elif event.usage:
            print(f"\n[{event.usage.prompt_tokens} prompt tokens, {event.usage.completion_tokens} completion tokens]")


if __name__ == "__main__":
    try:
        main()
    except OpenAIError as error:
        sys.exit(f"the fleet did not answer: {error}")
