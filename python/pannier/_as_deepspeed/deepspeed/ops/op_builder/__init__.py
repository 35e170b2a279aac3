"""What DeepSpeed compiles when it is first used, Pannier's library has: only the names are here."""

from typing import Any, ClassVar

from ...missing import explain


class OpBuilder:
    """The name of an operation, and whether there is one like it."""

    NAME: ClassVar[str] = ""
    is_there: ClassVar[bool] = False

    def is_compatible(self, verbose: bool = False) -> bool:
        """Whether Pannier has it."""
        return self.is_there

    def load(self, verbose: bool = True) -> Any:
        """Raises: the library's interface is `pannier`."""
        raise NotImplementedError(explain(f"deepspeed.ops.op_builder.{type(self).__name__}().load()"))


def _builder(name: str, operation: str, is_there: bool) -> type[OpBuilder]:
    return type(name, (OpBuilder,), {"NAME": operation, "is_there": is_there, "__module__": __name__})


CPUAdamBuilder = _builder("CPUAdamBuilder", "cpu_adam", True)
CPUAdagradBuilder = _builder("CPUAdagradBuilder", "cpu_adagrad", True)
CPULionBuilder = _builder("CPULionBuilder", "cpu_lion", True)
FusedAdamBuilder = _builder("FusedAdamBuilder", "fused_adam", True)
FusedLionBuilder = _builder("FusedLionBuilder", "fused_lion", True)
FusedLambBuilder = _builder("FusedLambBuilder", "fused_lamb", False)
AsyncIOBuilder = _builder("AsyncIOBuilder", "async_io", False)
GDSBuilder = _builder("GDSBuilder", "gds", False)
UtilsBuilder = _builder("UtilsBuilder", "utils", False)
TransformerBuilder = _builder("TransformerBuilder", "transformer", False)
InferenceBuilder = _builder("InferenceBuilder", "transformer_inference", False)
RandomLTDBuilder = _builder("RandomLTDBuilder", "random_ltd", False)
QuantizerBuilder = _builder("QuantizerBuilder", "quantizer", False)

ALL_OPS = {
    builder.NAME: builder()
    for builder in list(globals().values())
    if isinstance(builder, type) and issubclass(builder, OpBuilder) and builder is not OpBuilder
}

__all__ = ["ALL_OPS", "OpBuilder", *(type(builder).__name__ for builder in ALL_OPS.values())]
