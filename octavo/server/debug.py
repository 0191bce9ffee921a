"""Tables for people who look into a running server. Texts of prompts and answers are not in them."""

from __future__ import annotations

from typing import Any

from octavo.metrics.ring import COLUMNS
from octavo.server.service import Service


def job_table(service: Service) -> dict[str, Any]:
    """What is under way, oldest first, and what the gate says."""
    jobs = sorted(service.jobs, key=lambda job: -job.age)
    gate = service.gate
    return {
        "seats": {"taken": gate.taken, "running": gate.running, "queue": gate.queue},
        "requests": [
            {
                "id": job.id,
                "route": job.route,
                "age": round(job.age, 3),
                "engine_ids": [stream.number for stream in job.streams],
                "prompt_tokens": sum(len(stream.text.output.prompt_token_ids) for stream in job.streams),
                "tokens": sum(stream.tokens for stream in job.streams),
                "first_token": bool(job.streams) and all(stream.first_token > 0 for stream in job.streams),
                "n": job.params.n,
                "max_tokens": job.params.max_tokens,
            }
            for job in jobs
        ],
    }


def step_table(service: Service, now: float) -> dict[str, Any]:
    """Samples of the last minute as columns (`age` in seconds instead of a time), and rates of the last seconds."""
    ring = service.metrics.ring
    rows = ring.last(60.0)
    columns = {name: rows[:, i].tolist() for i, name in enumerate(COLUMNS)}
    columns["age"] = [round(now - time, 3) for time in columns.pop("time")]
    prompt = ring.rate("prompt", 10.0)
    return {
        "columns": columns,
        "tokens_per_second": round(ring.rate("generated", 5.0), 1),
        "hit_rate": round(ring.rate("hits", 10.0) / prompt, 4) if prompt else None,
    }
