//! Who makes cgroups, as a setting.

use clap::ValueEnum;
use coracle_cri::CgroupDriver;
use serde::Deserialize;

/// The driver's name in flags and file.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum Driver {
    /// We, by making directories
    Cgroupfs,
    /// systemd: pods are slices, containers scopes
    Systemd,
}

/// What was asked for, or the default.
pub(crate) fn decide(asked: Option<Driver>) -> CgroupDriver {
    match asked {
        None | Some(Driver::Cgroupfs) => CgroupDriver::Cgroupfs,
        Some(Driver::Systemd) => CgroupDriver::Systemd,
    }
}
