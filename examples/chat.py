"""A conversation of several turns, streamed, with what was drafted in brackets."""

import argparse

import mtplx

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--model", default="smollm2-135m")
parser.add_argument("--max-tokens", type=int, default=64)
args = parser.parse_args()

llm = mtplx.load(args.model)
messages = []
for question in ("Name three primary colours.", "Which of them is the sky's?"):
    messages.append({"role": "user", "content": question})
    print(f"> {question}")
    answer = ""
    for piece in llm.stream(messages, max_tokens=args.max_tokens):
        print(f"[{piece.text}]" if piece.drafted else piece.text, end="", flush=True)
        answer += piece.text
    print()
    messages.append({"role": "assistant", "content": answer})
