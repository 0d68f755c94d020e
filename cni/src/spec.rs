//! Types of the CNI specification: versions, network configuration lists, requests to plugins and their results. Pure
//! data without access to the kernel.
//!
//! Source of every rule: the Container Network Interface specification, 0.3.1 to 1.1.0.

pub(crate) mod list;
pub(crate) mod request;
pub(crate) mod result;

use std::fmt;

/// A version of the specification, in the order of its history.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Version {
    V0_3_0,
    V0_3_1,
    V0_4_0,
    V1_0_0,
    V1_1_0,
}

impl Version {
    pub(crate) const ALL: [Self; 5] = [Self::V0_3_0, Self::V0_3_1, Self::V0_4_0, Self::V1_0_0, Self::V1_1_0];
    pub(crate) const NEWEST: Self = Self::V1_1_0;

    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::V0_3_0 => "0.3.0",
            Self::V0_3_1 => "0.3.1",
            Self::V0_4_0 => "0.4.0",
            Self::V1_0_0 => "1.0.0",
            Self::V1_1_0 => "1.1.0",
        }
    }

    pub(crate) fn parse(text: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|version| version.name() == text)
    }

    /// Whether the version has CHECK, and the previous result in DEL: since 0.4.0.
    pub(crate) fn has_check(self) -> bool {
        self >= Self::V0_4_0
    }

    /// Whether the version has STATUS and GC: since 1.1.0.
    pub(crate) fn has_status_and_gc(self) -> bool {
        self >= Self::V1_1_0
    }
}

impl fmt::Display for Version {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.write_str(self.name())
    }
}

/// The command of a request: `CNI_COMMAND`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Command {
    Add,
    Del,
    Check,
    Status,
    Gc,
    Version,
}

impl Command {
    pub(crate) const ALL: [Self; 6] =
        [Self::Add, Self::Del, Self::Check, Self::Status, Self::Gc, Self::Version];

    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Add => "ADD",
            Self::Del => "DEL",
            Self::Check => "CHECK",
            Self::Status => "STATUS",
            Self::Gc => "GC",
            Self::Version => "VERSION",
        }
    }

    /// Whether the command concerns one attachment, and so needs container and interface.
    pub(crate) fn is_of_attachment(self) -> bool {
        matches!(self, Self::Add | Self::Del | Self::Check)
    }
}

/// Whether the text is a valid container ID or network name: the first character is alphanumeric, the other characters
/// may also be `_`, `.` or `-`.
pub(crate) fn is_identifier(text: &str) -> bool {
    let is_allowed = |c: char| c.is_ascii_alphanumeric() || matches!(c, '_' | '.' | '-');
    text.starts_with(|c: char| c.is_ascii_alphanumeric()) && text.chars().all(is_allowed)
}

/// Whether the kernel accepts the text as an interface name.
pub(crate) fn is_interface_name(text: &str) -> bool {
    let is_allowed = |c: char| !c.is_whitespace() && !matches!(c, '/' | ':');
    (1..=15).contains(&text.len()) && text != "." && text != ".." && text.chars().all(is_allowed)
}
