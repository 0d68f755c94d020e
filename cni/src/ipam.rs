//! Delegation to the IPAM plugin: Coracle's host-local in process, other plugins as executables (section 4, "Plugin
//! Delegation").

use crate::error::Error;
use crate::host::Host;
use crate::host_local;
use crate::plugin_executables::Executables;
use crate::plugin_kind::Kind;
use crate::spec::Command;
use crate::spec::request::Request;
use crate::spec::result::Answer;

/// Runs the IPAM plugin of the type `kind` with the request.
pub(crate) async fn run(
    host: &Host,
    executables: &Executables,
    kind: &str,
    request: &Request,
) -> Result<Option<Answer>, Error> {
    if is_in_process(host, executables, kind) {
        request.version()?;
        if request.command == Command::Add {
            request.check_args()?;
        }
        return host_local::run(host, request);
    }
    executables.run(kind, request).await
}

/// Whether the type is Coracle's host-local and runs in this process. In the node, host-local always runs in process.
/// In a plugin executable, it runs in process if the executable `host-local` is the same program: an execution would
/// have the same result, but would take some milliseconds more.
pub(crate) fn is_in_process(host: &Host, executables: &Executables, kind: &str) -> bool {
    Kind::parse(kind) == Some(Kind::HostLocal) && (host.in_process() || executables.is_this_program(kind))
}
