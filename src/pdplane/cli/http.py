"""Small JSON calls to our own servers, for the commands that look at a fleet."""

from __future__ import annotations

import argparse
import os
from typing import Any

import httpx

from pdplane.settings import BadSetting

DEFAULT_URL = "http://127.0.0.1:8000"
API_KEY = "PDPLANE_API_KEY"


def add_router_arguments(parser: argparse.ArgumentParser) -> None:
    """--url and --api-key, alike for every command that asks a router."""
    parser.add_argument("--url", default=DEFAULT_URL, help=f"the router [{DEFAULT_URL}]")
    parser.add_argument(
        "--api-key", default=os.environ.get(API_KEY, ""), help=f"the router's key, where it asks for one [${API_KEY}]"
    )


def client(url: str, api_key: str = "", timeout_s: float = 10.0) -> httpx.Client:
    headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
    return httpx.Client(base_url=url, headers=headers, timeout=timeout_s, trust_env=False)


def get(http: httpx.Client, path: str) -> tuple[int, Any]:
    """(status, JSON). Raises BadSetting where nobody answers, naming the address."""
    try:
        answer = http.get(path)
        return answer.status_code, answer.json()
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise unreachable(http, error) from None
    except ValueError:
        raise BadSetting(f"{http.base_url}{path.lstrip('/')} did not answer with JSON: is it ours?") from None


def unreachable(http: httpx.Client, error: Exception) -> BadSetting:
    reason = str(error) or type(error).__name__
    return BadSetting(
        f"nobody answers at {http.base_url} ({reason}); is it up? Start it with `pdplane up`, or give --url"
    )
