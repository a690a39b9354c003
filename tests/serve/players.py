"""Agents for tests, which worker processes import by name; nothing here is slow to import."""

from __future__ import annotations

import json
import os
import threading
import time
import urllib.request


def ask(base_url, api_key, messages, **more):
    """An answer, by a client of the standard library."""
    headers = {"Authorization": f"Bearer {api_key}", "Content-Type": "application/json"}
    body = json.dumps({"model": "policy", "messages": messages, **more}).encode()
    with urllib.request.urlopen(urllib.request.Request(f"{base_url}/chat/completions", body, headers)) as response:
        return json.load(response)["choices"][0]["message"]["content"]


def counting(row, base_url, api_key):
    """Two turns; the score is how many letters they have."""
    messages = [{"role": "user", "content": f"find {row['seed'] % 10}"}]
    first = ask(base_url, api_key, messages, max_tokens=6, temperature=0)
    messages += [{"role": "assistant", "content": first}, {"role": "user", "content": "again"}]
    second = ask(base_url, api_key, messages, max_tokens=6)
    return {"score": len(first + second) / 10, "first": float(len(first))}


async def later(row, base_url, api_key):
    """The same as a coroutine."""
    import asyncio

    return await asyncio.to_thread(counting, row, base_url, api_key)


def moody(row, base_url, api_key):
    """What the row says: raises before or after an answer, hangs, edits its history, or returns what is no score."""
    mood = row["mood"]
    if mood == "mute":
        raise RuntimeError("no")
    messages = [{"role": "user", "content": "find"}]
    first = ask(base_url, api_key, messages, max_tokens=6)
    if mood == "raise":
        raise RuntimeError("no")
    if mood == "hang":
        time.sleep(3)
    if mood == "edit":
        ask(base_url, api_key, [{"role": "user", "content": "list"}], max_tokens=9)
    return "much" if mood == "wrong" else 1.0 + 0.0 * len(first)


def adding(row, base_url, api_key):
    """A sum of one digit each, in two turns; the score is how many digits the policy says."""
    messages = [{"role": "user", "content": f"{row['seed'] % 10}+{row['seed'] // 10 % 10}="}]
    first = ask(base_url, api_key, messages, max_tokens=3)
    messages += [{"role": "assistant", "content": first}, {"role": "user", "content": "+1="}]
    second = ask(base_url, api_key, messages, max_tokens=3)
    return {"score": sum(map(str.isdigit, first + second)) / 6, "first": float(len(first))}


def talking(row, base_url, api_key):
    """One answer of whatever length the server allows."""
    return float(len(ask(base_url, api_key, [{"role": "user", "content": "find"}])))


def where(row, base_url, api_key):
    """The number of this process, and how many threads play in it."""
    time.sleep(row.get("seconds", 0.2))
    return {"score": os.getpid(), "most": sum(x.name.startswith("agent") for x in threading.enumerate())}
