"""Small models that the tests train, as source text for the nursery's children."""

PRELUDE = """
import json, os, torch
import torch.nn.functional as F
from torch import nn

def report(**values):
    print(json.dumps(values))

def peaks():
    return [torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()]
"""

LINEAR = (
    PRELUDE
    + """
model = nn.Linear(1024, 1024, device="cuda")
optimizer = torch.optim.AdamW(model.parameters())
for _ in range(2):
    model(torch.randn(64, 1024, device="cuda")).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
"""
)

TRANSFORMER = (
    PRELUDE
    + """
class Layer(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.before, self.between = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.wide = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x):
        b, t, d = x.shape
        parts = self.qkv(self.before(x)).chunk(3, -1)
        q, k, v = (p.view(b, t, self.heads, d // self.heads).transpose(1, 2) for p in parts)
        seen = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(seen.transpose(1, 2).reshape(b, t, d))
        return x + self.wide(self.between(x))

class Model(nn.Module):
    def __init__(self, tokens=5000, width=512, heads=8, layers=4):
        super().__init__()
        self.embed = nn.Embedding(tokens, width)
        self.layers = nn.Sequential(*(Layer(width, heads) for _ in range(layers)))
        self.head = nn.Linear(width, tokens, bias=False)

    def forward(self, x):
        return self.head(self.layers(self.embed(x)))

model = Model().cuda()
optimizer = torch.optim.AdamW(model.parameters())

def step(m, t=512):
    x = torch.randint(0, 5000, (m, t), device="cuda")
    with torch.autocast("cuda", torch.bfloat16):
        loss = F.cross_entropy(model(x).flatten(0, 1), x.flatten())
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
"""
)

CONVOLUTIONS = (
    PRELUDE
    + """
class Block(nn.Module):
    def __init__(self, into, width, stride):
        super().__init__()
        out = 4 * width
        self.main = nn.Sequential(
            nn.Conv2d(into, width, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU(True),
            nn.Conv2d(width, width, 3, stride, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU(True),
            nn.Conv2d(width, out, 1, bias=False), nn.BatchNorm2d(out),
        )
        self.side = nn.Sequential(nn.Conv2d(into, out, 1, stride, bias=False), nn.BatchNorm2d(out))

    def forward(self, x):
        return F.relu(self.main(x) + self.side(x), True)

model = nn.Sequential(
    nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64), nn.ReLU(True),
    nn.MaxPool2d(3, 2, 1), Block(64, 64, 1), Block(256, 128, 2), Block(512, 256, 2),
    nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(1024, 1000),
).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
scaler = torch.amp.GradScaler("cuda")

def step(m):
    x = torch.randn(m, 3, 224, 224, device="cuda")
    y = torch.randint(0, 1000, (m,), device="cuda")
    with torch.autocast("cuda", torch.float16):
        loss = F.cross_entropy(model(x), y)
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
"""
)
