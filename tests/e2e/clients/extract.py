"""A person that instructor extracts, as JSON: extract.py MODE URL."""

from __future__ import annotations

import json
import sys

import instructor
from openai import OpenAI
from pydantic import BaseModel


class Person(BaseModel):
    """A person."""

    name: str
    age: int


if __name__ == "__main__":
    client = instructor.from_openai(OpenAI(base_url=sys.argv[2]), mode=instructor.Mode[sys.argv[1]])
    person = client.chat.completions.create(
        model="M",
        response_model=Person,
        max_retries=0,
        messages=[{"role": "user", "content": "Extract: Ada Lovelace, 36 years old."}],
    )
    print(json.dumps(person.model_dump()))
