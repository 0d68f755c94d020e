//! Our own plugins. Their code runs in the node's process, also for lists that contain other executables, and in our
//! own executables.

use futures::future::BoxFuture;

use crate::error::Error;
use crate::firewall::Claim;
use crate::host::Host;
use crate::plugin_executables::Executables;
use crate::plugin_kind::Kind;
use crate::spec::Command;
use crate::spec::request::Request;
use crate::spec::result::Answer;
use crate::{bandwidth, bridge, firewall_plugin, host_local, loopback, portmap, tuning};

/// The plugin's firewall claim for the attachment of a request, which contains the result of ADD.
pub(crate) fn claim(kind: Kind, request: &Request) -> Result<Option<Claim>, Error> {
    match kind {
        Kind::Bridge => bridge::claim(request),
        Kind::Portmap => portmap::claim(request),
        Kind::Firewall => firewall_plugin::claim(request),
        Kind::HostLocal | Kind::Loopback | Kind::Bandwidth | Kind::Tuning => Ok(None),
    }
}

/// Runs the request. Only ADD has an answer.
///
/// The future is boxed. Otherwise the compiler makes a copy of the async function for each of its users, also in other
/// crates.
pub(crate) fn run<'a>(
    host: &'a Host,
    executables: &'a Executables,
    kind: Kind,
    request: &'a Request,
) -> BoxFuture<'a, Result<Option<Answer>, Error>> {
    Box::pin(run_command(host, executables, kind, request))
}

async fn run_command(
    host: &Host,
    executables: &Executables,
    kind: Kind,
    request: &Request,
) -> Result<Option<Answer>, Error> {
    request.version()?;
    if request.command == Command::Add {
        request.check_args()?;
    }
    match kind {
        Kind::Bridge => bridge::run(host, executables, request).await,
        Kind::HostLocal => host_local::run(host, request),
        Kind::Loopback => loopback::run(request).await,
        Kind::Portmap => portmap::run(host, request),
        Kind::Bandwidth => bandwidth::run(host, request).await,
        Kind::Tuning => tuning::run(request).await,
        Kind::Firewall => firewall_plugin::run(host, request),
    }
}
