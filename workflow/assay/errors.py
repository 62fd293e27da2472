"""Errors a user can act on. Each carries one sentence that names the thing, what was found and what to do."""


class AssayError(Exception):
    """A user-facing error: shown as its message alone, never as a traceback."""


class ConfigError(AssayError):
    """A configuration file or value is wrong."""


class SourceError(AssayError):
    """A pinned source cannot be had, or is not what its pin says."""


class SampleError(AssayError):
    """A sample set cannot be built, or is not what its lock says."""


class ServerError(AssayError):
    """A server under test cannot be started, reached or trusted."""


class DeviceError(AssayError):
    """Accelerators cannot be found, told apart, trusted or had."""


class NoDeviceError(DeviceError):
    """There is no accelerator here."""


class ReferenceFailure(AssayError):
    """A reference cannot be run, or does not answer as it should."""


class StoreError(AssayError):
    """A result file cannot be read or written."""


class MediaError(AssayError):
    """Media bytes are not what they were declared to be. `fault` is the machine-readable kind."""

    def __init__(self, fault: str, message: str) -> None:
        super().__init__(message)
        self.fault = fault
