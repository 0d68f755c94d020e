//! Names of our own plugin types.

/// A plugin type of our own.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// A bridge of the host, and a veth pair for each sandbox.
    Bridge,
    /// Addresses from ranges, recorded in files.
    HostLocal,
    /// The loopback interface.
    Loopback,
    /// Host ports that are forwarded to ports of a sandbox.
    Portmap,
    /// Bandwidth limits of a sandbox.
    Bandwidth,
    /// Sysctls and properties of a sandbox's interface.
    Tuning,
    /// Isolation of a sandbox.
    Firewall,
}

// === impl Kind ===

impl Kind {
    /// All types.
    pub const ALL: [Self; 7] = [
        Self::Bridge,
        Self::HostLocal,
        Self::Loopback,
        Self::Portmap,
        Self::Bandwidth,
        Self::Tuning,
        Self::Firewall,
    ];

    /// Name of the type and of its executable.
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

    /// The type with this name.
    #[must_use]
    pub fn parse(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|kind| kind.name() == name)
    }
}
