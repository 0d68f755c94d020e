//! SELinux labels of pods and containers, if the kernel has a policy for containers.
//!
//! The rules are those of containerd and CRI-O. The policy has default labels for processes and files of containers
//! (`lxc_contexts`); requested options have precedence. Each pod gets its own level with two categories, so that pods with
//! the same type are isolated from each other. Without SELinux the options are validated and have no effect.

mod label;
mod level;
mod policy;
mod relabel;

use std::path::Path;

use coracle_proto::cri;
use cri::{NamespaceMode, NamespaceOption};
use tracing::{info, warn};

pub(crate) use self::label::Labels;
use self::label::{RequestedLabel, of_container, of_pod};
use self::level::Levels;
pub use self::policy::labels_containers;
use self::policy::{Policy, is_enabled};
pub(crate) use self::relabel::relabel;
use crate::blocking::Abandoned;
use crate::error::Error;
use crate::namespaces::{self, PidNamespace};

const FIELD: &str = "selinux_options";
/// Directories of layers in the runtime's root directory.
const LAYERS: [&str; 5] = ["images", "containers", "parts", "mount-points", "mount-points-token"];

/// The SELinux policy of this machine, and the used levels.
#[derive(Debug)]
pub(crate) struct Selinux {
    /// `None` if containers are not labelled.
    policy: Option<Policy>,
    levels: Levels,
}

/// Configuration and labels of a container's pod.
pub(crate) struct PodLabels<'a> {
    pub(crate) config: &'a cri::PodSandboxConfig,
    pub(crate) labels: Option<&'a Labels>,
}

// === impl Selinux ===

impl Selinux {
    /// Reads the kernel's state and the policy.
    pub(crate) fn detect() -> Self {
        Self { policy: Policy::detect(), levels: Levels::default() }
    }

    /// Labels the layers of images and containers in the runtime's root directory, once. New files inherit the label of
    /// their directory, and keep it after a rename. The kernel checks a program that maps a file of its root against
    /// the label of the layer, not of the overlay. Policies have rules for the directories of other runtimes, but not
    /// for the directory of this runtime.
    pub(crate) fn label_layers(&self, root: &Path) {
        let Some(policy) = &self.policy else { return };
        let label = policy.defaults.read_only.to_string();
        for dir in LAYERS.map(|name| root.join(name)) {
            if !dir.is_dir() || relabel::has(&dir, &label) {
                continue;
            }
            match relabel(&dir, &label, &Abandoned::default()) {
                Ok(()) => info!(dir = %dir.display(), label, "labelled the layers"),
                Err(error) => warn!(dir = %dir.display(), label, %error, "cannot label the layers"),
            }
        }
    }

    /// The state of SELinux, for the runtime's status.
    pub(crate) fn describe(&self) -> String {
        match &self.policy {
            Some(policy) => policy.describe(),
            None if is_enabled() => "on, but the policy has no labels for containers".to_owned(),
            None => "off".to_owned(),
        }
    }

    /// The labels of a new pod. Its level is used until [`Selinux::release`].
    ///
    /// # Errors
    /// If the options are invalid, or the policy does not contain the labels.
    pub(crate) fn label_pod(
        &self,
        id: &str,
        config: &cri::PodSandboxConfig,
    ) -> Result<Option<Labels>, Error> {
        let options = namespaces::security(config).and_then(|security| security.selinux_options.as_ref());
        let requested = RequestedLabel::of(options).map_err(|why| Error::invalid(FIELD, why))?;
        let Some(policy) = &self.policy else { return Ok(None) };
        let level = match &requested.level {
            Some(level) => {
                self.levels.hold(id, level);
                None
            }
            None => self.levels.pick(id),
        };
        let labels = of_pod(&policy.defaults, &requested, level);
        self.check(policy, &requested, labels).map(Some)
    }

    /// The labels of a new container in a labelled pod. A requested level is used until [`Selinux::release`].
    ///
    /// # Errors
    /// See [`Selinux::label_pod`].
    pub(crate) fn label_container(
        &self,
        id: &str,
        config: &cri::ContainerConfig,
        pod: PodLabels<'_>,
    ) -> Result<Option<Labels>, Error> {
        let security = config.linux.as_ref().and_then(|linux| linux.security_context.as_ref());
        let options = security.and_then(|security| security.selinux_options.as_ref());
        let requested = RequestedLabel::of(options).map_err(|why| Error::invalid(FIELD, why))?;
        let (Some(policy), Some(pods)) = (&self.policy, pod.labels) else { return Ok(None) };
        if let Some(level) = &requested.level {
            self.levels.hold(id, level);
        }
        let own = security.and_then(|security| security.namespace_options.as_ref());
        let of_pod = namespaces::options(pod.config);
        let modes = [own.map(NamespaceOption::ipc).unwrap_or_default(), of_pod.ipc()];
        let nodes_processes = namespaces::pids(&of_pod, own) == PidNamespace::Node;
        let missing_isolation = label::MissingIsolation {
            privileged: security.is_some_and(|security| security.privileged),
            shares_with_node: nodes_processes || modes.contains(&NamespaceMode::Node),
        };
        let labels = of_container(pods, &requested, label::MissingIsolation::default());
        self.check(policy, &requested, labels)?;
        Ok(Some(of_container(pods, &requested, missing_isolation)))
    }

    /// Marks the level of a recovered pod or container as used.
    pub(crate) fn hold(&self, id: &str, labels: Option<&Labels>) {
        if let Some(level) = labels.and_then(Labels::level) {
            self.levels.hold(id, level);
        }
    }

    /// Releases the level of a pod or container.
    pub(crate) fn release(&self, id: &str) {
        self.levels.release(id);
    }

    /// Refuses labels that the policy does not contain; otherwise the error would appear only when the program is
    /// started.
    fn check(&self, policy: &Policy, requested: &RequestedLabel, labels: Labels) -> Result<Labels, Error> {
        if *requested != RequestedLabel::default() {
            for label in [&labels.process, &labels.mount].into_iter().flatten() {
                policy.check(label).map_err(|error| {
                    Error::invalid(FIELD, format!("the policy refuses the label {label}: {error}"))
                })?;
            }
        }
        Ok(labels)
    }
}
