//! What can be set about the control plane.

use std::net::{IpAddr, SocketAddr};
use std::path::PathBuf;
use std::time::Duration;

use clap::Args;
use ipnetwork::IpNetwork;
use serde::Deserialize;

use super::ranges::{self, Ranges};
use super::{Dirs, every_address, seconds};

/// Settings of the control plane.
#[derive(Args, Clone, Default, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case", default)]
pub(crate) struct ControlPlaneSettings {
    /// Where the API server listens [default: port 6443 of every address]
    #[arg(long, value_name = "ADDRESS")]
    listen: Option<SocketAddr>,
    /// The address that clients are told [default: found from the routes]
    #[arg(long, value_name = "IP")]
    advertise_address: Option<IpAddr>,
    /// Ranges that nodes' pod ranges are cut from, one of each family [default: 10.42.0.0/16]
    #[arg(long, value_name = "CIDR", value_delimiter = ',')]
    cluster_cidr: Vec<IpNetwork>,
    /// Range of service addresses [default: 10.43.0.0/16; fd43::/112 where pods have IPv6 alone]
    #[arg(long, value_name = "CIDR")]
    service_cidr: Option<IpNetwork>,
    /// Prefix length of a node's range of IPv4 [default: 24]
    #[arg(long, value_name = "LENGTH")]
    node_cidr_mask_size_ipv4: Option<u8>,
    /// Prefix length of a node's range of IPv6 [default: 64]
    #[arg(long, value_name = "LENGTH")]
    node_cidr_mask_size_ipv6: Option<u8>,
    /// Static tokens: lines of token,user,uid,"group,group"
    #[arg(long, value_name = "FILE")]
    token_auth_file: Option<PathBuf>,
    /// Keys that encrypt Secrets in the store: lines of an id and 32 bytes in base64, the first one encrypts, all of them
    /// decrypt [default: sealing.key in the state directory, made at the first start]
    #[arg(long, value_name = "FILE")]
    encryption_key_file: Option<PathBuf>,
    /// Configuration of the PodSecurity admission plugin: defaults and exemptions, as for kube-apiserver
    #[arg(long, value_name = "FILE")]
    admission_control_config_file: Option<PathBuf>,
    /// A further name or address by which clients reach the API server, may be repeated
    #[arg(long, value_name = "NAME")]
    tls_san: Vec<String>,
    /// The node that joins from this machine, and may have the API server's addresses
    #[arg(long, value_name = "NAME")]
    own_node: Option<String>,
    /// Seconds for which the certificates are valid that nodes ask for [default: 31536000]
    #[arg(long, value_name = "SECONDS", value_parser = clap::value_parser!(u32).range(1..))]
    cluster_signing_seconds: Option<u32>,
    /// Seconds after which a node that is not heard of is Unknown, and its pods are moved [default: 50]
    #[arg(long, value_name = "SECONDS", value_parser = clap::value_parser!(u32).range(1..))]
    node_monitor_grace_seconds: Option<u32>,
}

/// The control plane's settings, all decided but for what it finds out itself.
#[derive(Clone, Debug)]
pub(crate) struct ControlPlane {
    pub(crate) dirs: Dirs,
    pub(crate) listen: SocketAddr,
    pub(crate) advertise_address: Option<IpAddr>,
    pub(crate) ranges: Ranges,
    pub(crate) token_auth_file: Option<PathBuf>,
    pub(crate) encryption_key_file: Option<PathBuf>,
    pub(crate) admission_control_config_file: Option<PathBuf>,
    pub(crate) tls_sans: Vec<String>,
    pub(crate) own_node: Option<String>,
    pub(crate) signing_duration: Duration,
    pub(crate) node_monitor_grace: Duration,
}

impl ControlPlaneSettings {
    /// These, and where they say nothing what the file says.
    pub(super) fn over(self, file: Self) -> Self {
        Self {
            listen: self.listen.or(file.listen),
            advertise_address: self.advertise_address.or(file.advertise_address),
            cluster_cidr: if self.cluster_cidr.is_empty() { file.cluster_cidr } else { self.cluster_cidr },
            service_cidr: self.service_cidr.or(file.service_cidr),
            node_cidr_mask_size_ipv4: self.node_cidr_mask_size_ipv4.or(file.node_cidr_mask_size_ipv4),
            node_cidr_mask_size_ipv6: self.node_cidr_mask_size_ipv6.or(file.node_cidr_mask_size_ipv6),
            token_auth_file: self.token_auth_file.or(file.token_auth_file),
            encryption_key_file: self.encryption_key_file.or(file.encryption_key_file),
            admission_control_config_file: self
                .admission_control_config_file
                .or(file.admission_control_config_file),
            tls_san: if self.tls_san.is_empty() { file.tls_san } else { self.tls_san },
            own_node: self.own_node.or(file.own_node),
            cluster_signing_seconds: self.cluster_signing_seconds.or(file.cluster_signing_seconds),
            node_monitor_grace_seconds: self.node_monitor_grace_seconds.or(file.node_monitor_grace_seconds),
        }
    }

    /// Puts defaults where nothing is said.
    pub(super) fn decide(self, dirs: Dirs) -> anyhow::Result<ControlPlane> {
        Ok(ControlPlane {
            dirs,
            listen: self.listen.unwrap_or_else(|| every_address(6443)),
            advertise_address: self.advertise_address,
            ranges: ranges::decide(
                self.cluster_cidr,
                self.service_cidr,
                [self.node_cidr_mask_size_ipv4, self.node_cidr_mask_size_ipv6],
            )?,
            token_auth_file: self.token_auth_file,
            encryption_key_file: self.encryption_key_file,
            admission_control_config_file: self.admission_control_config_file,
            tls_sans: self.tls_san,
            own_node: self.own_node,
            signing_duration: seconds(self.cluster_signing_seconds.unwrap_or(365 * 24 * 3600)),
            node_monitor_grace: seconds(self.node_monitor_grace_seconds.unwrap_or(50)),
        })
    }
}
