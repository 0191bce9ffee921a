import numpy as np
from numpy.typing import NDArray

class Engine:
    def __init__(
        self,
        sizes: list[int],
        factors: list[float],
        gelu: bool,
        post_norms: bool,
        layers: list[list[int]],
        frequencies: list[float],
        magnitude: float,
        window_frequencies: list[float],
        window_magnitude: float,
        kv: str,
        threads: int,
        isa: str,
    ) -> None: ...
    def add_matrix(
        self,
        layer: int,
        name: str,
        part: int,
        stored: str,
        format: str,
        rows: int,
        columns: int,
        first: NDArray[np.uint8],
        second: NDArray[np.uint8],
        mapped: bool,
    ) -> None: ...
    def add_grouped(
        self,
        layer: int,
        name: str,
        part: int,
        stored: str,
        group: int,
        rows: int,
        columns: int,
        first: list[NDArray[np.uint8]],
        second: list[NDArray[np.uint8]],
        order: NDArray[np.int32],
        mapped: bool,
    ) -> None: ...
    def add_vector(self, layer: int, name: str, part: int, values: NDArray[np.float32]) -> None: ...
    def ready(self) -> None: ...
    def copy_blocks(self, pairs: NDArray[np.int32]) -> None: ...
    def step(
        self,
        ids: NDArray[np.int32],
        device_rows: NDArray[np.int32],
        start: NDArray[np.int32],
        length: NDArray[np.int32],
        sampled: NDArray[np.int32],
        tables: NDArray[np.int32],
        params: NDArray[np.int32],
        tokens: NDArray[np.int32],
        bad: NDArray[np.uint8],
    ) -> None: ...
    def forward(
        self,
        ids: NDArray[np.int32],
        device_rows: NDArray[np.int32],
        start: NDArray[np.int32],
        length: NDArray[np.int32],
        sampled: NDArray[np.int32],
        tables: NDArray[np.int32],
    ) -> None: ...
    def head(self, first: int, out: NDArray[np.float32], bad: NDArray[np.uint8]) -> None: ...
    def sample(
        self,
        logits: NDArray[np.float32],
        params: NDArray[np.int32],
        positions: NDArray[np.int32],
        tokens: NDArray[np.int32],
    ) -> None: ...
    def log_sum_exp(self, row: NDArray[np.float32]) -> float: ...
    def count_greater(self, row: NDArray[np.float32], value: float) -> int: ...
    @property
    def isa(self) -> str: ...
    @property
    def threads(self) -> int: ...
    @property
    def padded_vocab(self) -> int: ...
    @property
    def weight_bytes(self) -> int: ...
    @property
    def kv_bytes(self) -> int: ...
    @property
    def shared_segments(self) -> int: ...
    @property
    def calls(self) -> int: ...

def kernel_sets() -> list[str]: ...
def kv_block_bytes(kv: str, head_dim: int, kv_heads: int, block_size: int) -> int: ...
def time_product(
    isa: str,
    stored: str,
    format: str,
    rows: int,
    columns: int,
    weights: NDArray[np.uint8],
    m: int,
    copies: int,
    threads: int,
    repeats: int,
) -> float: ...
def time_grouped(
    isa: str,
    stored: str,
    group: int,
    rows: int,
    columns: int,
    weights: list[NDArray[np.uint8]],
    m: int,
    copies: int,
    threads: int,
    repeats: int,
) -> float: ...
