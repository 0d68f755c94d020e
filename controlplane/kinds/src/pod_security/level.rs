//! Levels and versions of the Pod Security Standards.

use std::fmt;

/// The level of a policy, ordered from loose to strict.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Level {
    /// No checks.
    Privileged,
    /// Known privilege escalations are forbidden.
    Baseline,
    /// The current best practices of hardening are required.
    Restricted,
}

/// Version of the checks: the version of a Kubernetes release, or the newest version.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Version {
    /// The newest checks.
    Latest,
    /// `v1.<minor>`.
    Minor(u32),
}

/// A level with the version of its checks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LevelVersion {
    /// The level.
    pub level: Level,
    /// The version of its checks.
    pub version: Version,
}

// === impl Level ===

impl Level {
    /// Reads a label's value.
    ///
    /// # Errors
    /// The rule that the value breaks.
    pub fn parse(text: &str) -> Result<Self, &'static str> {
        match text {
            "privileged" => Ok(Self::Privileged),
            "baseline" => Ok(Self::Baseline),
            "restricted" => Ok(Self::Restricted),
            _ => Err("must be one of privileged, baseline, restricted"),
        }
    }
}

impl fmt::Display for Level {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Privileged => "privileged",
            Self::Baseline => "baseline",
            Self::Restricted => "restricted",
        })
    }
}

// === impl Version ===

impl Version {
    /// Reads a label's value: `latest` or `v1.<minor>` without leading zeros.
    ///
    /// # Errors
    /// The rule that the value breaks.
    pub fn parse(text: &str) -> Result<Self, &'static str> {
        if text == "latest" {
            return Ok(Self::Latest);
        }
        let minor = text.strip_prefix("v1.").filter(|minor| {
            let digits = !minor.is_empty() && minor.bytes().all(|byte| byte.is_ascii_digit());
            digits && (minor.len() == 1 || !minor.starts_with('0'))
        });
        let minor = minor.and_then(|minor| minor.parse().ok());
        minor.map(Self::Minor).ok_or("must be \"latest\" or \"v1.x\"")
    }
}

impl fmt::Display for Version {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Latest => f.write_str("latest"),
            Self::Minor(minor) => write!(f, "v1.{minor}"),
        }
    }
}

// === impl LevelVersion ===

impl LevelVersion {
    /// No checks.
    pub const PRIVILEGED: Self = Self { level: Level::Privileged, version: Version::Latest };

    /// Whether both have the same effect. The version of `privileged` has no effect.
    pub fn is_equivalent(&self, other: &Self) -> bool {
        self == other || (self.level == Level::Privileged && other.level == Level::Privileged)
    }
}

impl fmt::Display for LevelVersion {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}", self.level, self.version)
    }
}
