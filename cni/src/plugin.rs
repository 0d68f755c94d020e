//! Our own plugin types, by name: the same code in process, in a chain with executables, and as executables.

use crate::error::Error;
use crate::firewall::Claim;
use crate::host::Host;
use crate::invoke::Executables;
use crate::spec::Command;
use crate::spec::request::Request;
use crate::spec::result::Answer;
use crate::{bandwidth, bridge, gate, host_local, loopback, portmap, tuning};

/// A type of our own.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// A bridge of the host, and a veth pair for each sandbox.
    Bridge,
    /// Addresses out of ranges, kept in files.
    HostLocal,
    /// The loopback interface, set up.
    Loopback,
    /// Ports of the host that lead to ports of a sandbox.
    Portmap,
    /// Limits of the traffic to and from a sandbox.
    Bandwidth,
    /// Kernel parameters and properties of a sandbox's interface.
    Tuning,
    /// Who may reach a sandbox.
    Firewall,
}

// === impl Kind ===

impl Kind {
    /// All of them.
    pub const ALL: [Self; 7] = [
        Self::Bridge,
        Self::HostLocal,
        Self::Loopback,
        Self::Portmap,
        Self::Bandwidth,
        Self::Tuning,
        Self::Firewall,
    ];

    /// The type's name, which is its executable's.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Bridge => "bridge",
            Self::HostLocal => "host-local",
            Self::Loopback => "loopback",
            Self::Portmap => "portmap",
            Self::Bandwidth => "bandwidth",
            Self::Tuning => "tuning",
            Self::Firewall => "firewall",
        }
    }

    /// The type of this name.
    #[must_use]
    pub fn parse(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|kind| kind.name() == name)
    }
}

/// What the plugin wants of the firewall for the attachment of a request, which has the result of its ADD.
pub(crate) fn claim(kind: Kind, request: &Request) -> Result<Option<Claim>, Error> {
    match kind {
        Kind::Bridge => bridge::claim(request),
        Kind::Portmap => portmap::claim(request),
        Kind::Firewall => gate::claim(request),
        Kind::HostLocal | Kind::Loopback | Kind::Bandwidth | Kind::Tuning => Ok(None),
    }
}

/// Does what the request asks. An answer to ADD alone.
pub(crate) async fn run(
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
        Kind::Firewall => gate::run(host, request),
    }
}
