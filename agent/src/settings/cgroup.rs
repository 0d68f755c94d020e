//! The cgroup driver, as a setting.

use clap::ValueEnum;
use coracle_cri::CgroupDriver;

use super::value::choices;

/// Name of the driver in flags and file.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum Driver {
    /// The node makes cgroups as directories.
    Cgroupfs,
    /// systemd makes cgroups: pods are slices, containers are scopes.
    Systemd,
}

choices!(Driver);

impl From<Driver> for CgroupDriver {
    fn from(driver: Driver) -> Self {
        match driver {
            Driver::Cgroupfs => Self::Cgroupfs,
            Driver::Systemd => Self::Systemd,
        }
    }
}
