//! The file with a container's own process. The spec of an exec is based on it.

use std::path::Path;

use oci_spec::runtime::Process;

use crate::error::Error;

/// Name of the file in the container's bundle.
pub(crate) const PROCESS_FILE: &str = "process.json";

/// Reads the process from the file at this path.
pub(crate) fn read_process(path: &Path) -> Result<Process, Error> {
    let bytes = std::fs::read(path).map_err(Error::file("read", path))?;
    let failed = |source| Error::Format { doing: "decode", path: path.to_owned(), source };
    serde_json::from_slice(&bytes).map_err(failed)
}
