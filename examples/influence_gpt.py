"""Where a small GPT has a word from: attributions to single training tokens.

A transformer reads where people live, which is a matter of their family: two families in each town. It is then asked
for people it has not read of, and for every town it names, the index finds the training tokens that helped most. Prints
some, how many answers are right, and how often the best token is the town of a relative. (Other sentences name the same
town, too, for the other family.) Exits with status 1 if that is not so for most of the answers.
"""

import sys
import tempfile

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from persample import influence as pi

GIVEN = "ada ben cleo dan eva finn gus hana ivo jane karl lea max nina olaf pia".split()
FAMILIES = "archer baker cooper draper fisher mason potter tailor".split()
TOWNS = "aston birk colne dover".split()
WORDS = [".", "lives", "in", *GIVEN, *FAMILIES, *TOWNS]
WIDTH, LENGTH, STEPS, ASKED = 48, 6, 150, 20


class GPT(nn.Module):
    """Two layers of causal attention; words have one table for coming in and going out."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(len(WORDS), WIDTH), nn.Embedding(LENGTH, WIDTH)
        layer = nn.TransformerEncoderLayer(WIDTH, 4, 2 * WIDTH, 0.0, F.gelu, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, nn.LayerNorm(WIDTH), enable_nested_tensor=False)

    def forward(self, tokens: Tensor) -> Tensor:
        length = tokens.shape[1]
        x = self.words(tokens) + self.places(torch.arange(length))
        mask = nn.Transformer.generate_square_subsequent_mask(length)
        return self.layers(x, mask=mask, is_causal=True) @ self.words.weight.t()


def losses_fn(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """(B, T): the loss of every next word, where it counts."""
    tokens, counts = batch
    logits = model(tokens[:, :-1])
    return F.cross_entropy(logits.transpose(1, 2), tokens[:, 1:], reduction="none") * counts[:, 1:]


def sentences() -> list[str]:
    """Everybody of every family, in random order."""
    homes = {family: TOWNS[i % len(TOWNS)] for i, family in enumerate(FAMILIES)}
    people = [f"{given} {family} lives in {homes[family]} ." for given in GIVEN for family in FAMILIES]
    return [people[i] for i in torch.randperm(len(people), generator=torch.Generator().manual_seed(0)).tolist()]


def batch_of(texts: list[str], place: int | None = None) -> tuple[Tensor, Tensor]:
    """Tokens, and which of them count: all, or those at one place."""
    tokens = torch.tensor([[WORDS.index(word) for word in text.split()] for text in texts])
    counts = torch.ones(LENGTH) if place is None else F.one_hot(torch.tensor(place), LENGTH)
    return tokens, counts.float().expand(len(tokens), -1)


def train(batch: tuple[Tensor, Tensor]) -> GPT:
    torch.manual_seed(0)
    model = GPT()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(STEPS):
        optimizer.zero_grad()
        losses_fn(model, batch).mean().backward()
        optimizer.step()
    return model.eval()


def main() -> int:
    texts = sentences()
    asked, read = texts[:ASKED], texts[ASKED:]
    model = train(batch_of(read))
    queries = batch_of(asked, place=4)  # the loss of the town alone
    right = int((model(queries[0][:, :4])[:, -1].argmax(1) == queries[0][:, 4]).sum())
    with tempfile.TemporaryDirectory() as folder:
        index = pi.Index(f"{folder}/index", model, losses_fn, sketch=pi.Blocks(16, 16, seed=0))
        index.build([batch_of(read[i : i + 12]) for i in range(0, len(read), 12)]).fit(pi.Shampoo())
        # Names come as a surprise, and have long gradients, which are not to count for more.
        hits = index.query(queries, k=3, per="token", normalise=True)
    assert hits.tokens is not None
    found = 0
    for q, text in enumerate(asked):
        best = [(read[i].split(), t + 1) for i, t in zip(hits.ids[q].tolist(), hits.tokens[q].tolist(), strict=True)]
        words, place = best[0]  # the loss of place t is that of word t + 1
        found += place == 4 and words[1] == text.split()[1]
        if q < 4:
            told = ", ".join(" ".join(f"[{w}]" if i == p else w for i, w in enumerate(ws[:-1])) for ws, p in best)
            print(f"{text} Best tokens: {told}")
    print(f"{right} of {ASKED} answers are right; the best token is the town of a relative for {found}")
    return 0 if found > ASKED / 2 else 1


if __name__ == "__main__":
    sys.exit(main())
