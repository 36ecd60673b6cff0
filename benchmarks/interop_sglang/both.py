"""The same questions to both registries, from empty ones: statuses, bodies and types of content."""

from __future__ import annotations

import json

import httpx
from peer_process import Peer
from report import Row
from statuses import SCENES, Question, Scene

from pdplane.registry.server import RegistryConfig, RegistryServer


async def compare(peer: Peer) -> list[Row]:
    rows = []
    for scene in SCENES:
        ours = RegistryServer(RegistryConfig(port=0))
        await ours.start()
        try:
            rows += await _play(scene, await peer.serve(), ours.port)
        finally:
            await ours.stop()
    return rows


async def _play(scene: Scene, theirs: int, ours: int) -> list[Row]:
    async with httpx.AsyncClient(trust_env=False, timeout=10.0) as http:
        return [
            _row(scene, question, await _ask(http, theirs, question), await _ask(http, ours, question))
            for question in scene.questions
        ]


async def _ask(http: httpx.AsyncClient, port: int, question: Question) -> httpx.Response:
    headers = {"content-type": "application/json"} if question.body else {}
    url = f"http://127.0.0.1:{port}{question.path}"
    return await http.request(question.method, url, content=question.body or None, headers=headers)


def _row(scene: Scene, question: Question, theirs: httpx.Response, ours: httpx.Response) -> Row:
    good = (theirs.status_code, ours.status_code) == (question.theirs, question.ours)
    note = question.difference
    if good and not note and (told := _apart(theirs, ours)):
        good, note = False, told
    if not good and not note:
        note = f"due: {question.theirs} and {question.ours}"
    return Row(scene.name, question.name, str(theirs.status_code), str(ours.status_code), good, note)


def _apart(theirs: httpx.Response, ours: httpx.Response) -> str:
    """How two answers of one status differ."""
    kinds = [answer.headers.get("content-type", "") for answer in (theirs, ours)]
    if kinds[0] != kinds[1]:
        return f"content types {kinds[0]!r} and {kinds[1]!r}"
    if _read(theirs) != _read(ours):
        return f"bodies {theirs.text[:200]!r} and {ours.text[:200]!r}"
    return ""


def _read(answer: httpx.Response) -> object:
    try:
        return json.loads(answer.text)
    except ValueError:
        return answer.text
