//! Selection of the controllers to run, by upstream's names.

/// The name of each queue and of its controller. Controllers that exist upstream have upstream's name.
const NAMES: &[(&str, &str)] = &[
    ("deployment", "deployment-controller"),
    ("replica-set", "replicaset-controller"),
    ("replication-controller", "replicationcontroller-controller"),
    ("stateful-set", "statefulset-controller"),
    ("daemon-set", "daemonset-controller"),
    ("job", "job-controller"),
    ("job-orphan", "job-controller"),
    ("cron-job", "cronjob-controller"),
    ("horizontal-pod-autoscaler", "horizontal-pod-autoscaler-controller"),
    ("ttl-after-finished", "ttl-after-finished-controller"),
    ("service-account", "serviceaccount-controller"),
    ("root-ca", "root-ca-certificate-publisher-controller"),
    ("account-token", "serviceaccount-token-controller"),
    ("pod-cidr", "node-ipam-controller"),
    ("pod-gc", "pod-garbage-collector-controller"),
    ("namespace", "namespace-controller"),
    ("endpoints", "endpoints-controller"),
    ("endpoint-slice", "endpointslice-controller"),
    ("endpoint-slice-mirroring", "endpointslice-mirroring-controller"),
    ("ip-address", "ip-address-controller"),
    ("service-cidr", "service-cidr-controller"),
    ("node-balancer", "service-lb-controller"),
    ("address-pool", "service-lb-controller"),
    ("resource-claim", "resourceclaim-controller"),
    ("resource-claim-release", "resourceclaim-controller"),
    ("resource-quota", "resourcequota-controller"),
    ("pod-group-protection", "podgroup-protection-controller"),
    ("storage-version-migrator", "storage-version-migrator-controller"),
    ("csr-approving", "certificatesigningrequest-approving-controller"),
    ("csr-signing", "certificatesigningrequest-signing-controller"),
    ("csr-cleaner", "certificatesigningrequest-cleaner-controller"),
    ("token-cleaner", "token-cleaner-controller"),
    ("legacy-token-cleaner", "legacy-serviceaccount-token-cleaner-controller"),
    ("bootstrap-signer", "bootstrap-signer-controller"),
    ("taint-eviction", "taint-eviction-controller"),
    ("device-taint-eviction", "device-taint-eviction-controller"),
    ("disruption", "disruption-controller"),
    ("stale-disruption", "disruption-controller"),
    ("cluster-role-aggregation", "clusterrole-aggregation-controller"),
    ("volume-binding", "persistentvolume-binder-controller"),
    ("local-volume", "local-volume-controller"),
    ("claim-protection", "persistentvolumeclaim-protection-controller"),
    ("volume-protection", "persistentvolume-protection-controller"),
    ("attributes-class-protection", "volumeattributesclass-protection-controller"),
    ("ephemeral-volume", "ephemeral-volume-controller"),
    ("node-lifecycle", "node-lifecycle-controller"),
    ("node-ttl", "ttl-controller"),
    ("garbage", "garbage-collector-controller"),
];

/// Upstream's controllers whose work this API server always does.
const OF_SERVER: &[&str] = &["resourcequota-controller", "validatingadmissionpolicy-status-controller"];

/// Upstream's other controllers. They do not exist in this program, so `--controllers` accepts their names without an
/// effect.
const ABSENT: &[&str] = &[
    "cloud-node-lifecycle-controller",
    "kube-apiserver-serving-clustertrustbundle-publisher-controller",
    "node-route-controller",
    "persistentvolume-attach-detach-controller",
    "persistentvolume-expander-controller",
    "podcertificaterequest-cleaner-controller",
    "resourcepoolstatusrequest-controller",
    "selinux-warning-controller",
    "storageversion-garbage-collector-controller",
];

/// Former names of upstream's controllers, with their present names. Upstream's flag still accepts the former names,
/// and kubeadm sets `*,bootstrapsigner,tokencleaner`. Source: `KCMControllerAliases`.
const FORMER: &[(&str, &str)] = &[
    ("attachdetach", "persistentvolume-attach-detach-controller"),
    ("bootstrapsigner", "bootstrap-signer-controller"),
    ("cloud-node-lifecycle", "cloud-node-lifecycle-controller"),
    ("clusterrole-aggregation", "clusterrole-aggregation-controller"),
    ("cronjob", "cronjob-controller"),
    ("csrapproving", "certificatesigningrequest-approving-controller"),
    ("csrcleaner", "certificatesigningrequest-cleaner-controller"),
    ("csrsigning", "certificatesigningrequest-signing-controller"),
    ("daemonset", "daemonset-controller"),
    ("deployment", "deployment-controller"),
    ("disruption", "disruption-controller"),
    ("endpoint", "endpoints-controller"),
    ("endpointslice", "endpointslice-controller"),
    ("endpointslicemirroring", "endpointslice-mirroring-controller"),
    ("ephemeral-volume", "ephemeral-volume-controller"),
    ("garbagecollector", "garbage-collector-controller"),
    ("horizontalpodautoscaling", "horizontal-pod-autoscaler-controller"),
    ("job", "job-controller"),
    ("legacy-service-account-token-cleaner", "legacy-serviceaccount-token-cleaner-controller"),
    ("namespace", "namespace-controller"),
    ("nodeipam", "node-ipam-controller"),
    ("nodelifecycle", "node-lifecycle-controller"),
    ("persistentvolume-binder", "persistentvolume-binder-controller"),
    ("persistentvolume-expander", "persistentvolume-expander-controller"),
    ("podgc", "pod-garbage-collector-controller"),
    ("pv-protection", "persistentvolume-protection-controller"),
    ("pvc-protection", "persistentvolumeclaim-protection-controller"),
    ("replicaset", "replicaset-controller"),
    ("replicationcontroller", "replicationcontroller-controller"),
    ("resource-claim-controller", "resourceclaim-controller"),
    ("resourcequota", "resourcequota-controller"),
    ("root-ca-cert-publisher", "root-ca-certificate-publisher-controller"),
    ("route", "node-route-controller"),
    ("service", "service-lb-controller"),
    ("serviceaccount", "serviceaccount-controller"),
    ("serviceaccount-token", "serviceaccount-token-controller"),
    ("statefulset", "statefulset-controller"),
    ("storage-version-gc", "storageversion-garbage-collector-controller"),
    ("tokencleaner", "token-cleaner-controller"),
    ("ttl", "ttl-controller"),
    ("ttl-after-finished", "ttl-after-finished-controller"),
];

/// The controllers to run. The default is all controllers.
#[derive(Clone, Debug, Default)]
pub struct ControllerSelection {
    /// Values as in upstream's flag `--controllers`: `*` for all, `-*` for none, a name, or `-` and a name. Empty means
    /// all.
    entries: Vec<String>,
}

/// An entry of the selection with the present name of its controller.
fn present(entry: String) -> String {
    let (sign, name) = entry.strip_prefix('-').map_or(("", entry.as_str()), |name| ("-", name));
    match FORMER.iter().find(|(former, _)| *former == name) {
        Some((_, now)) => format!("{sign}{now}"),
        None => entry,
    }
}

/// A name does not belong to a controller.
#[derive(Debug, thiserror::Error)]
#[error("{0:?} is not a controller; the controllers are {all}", all = known().join(", "))]
pub struct UnknownController(String);

/// All names that `--controllers` accepts.
fn known() -> Vec<&'static str> {
    let mut names: Vec<_> = NAMES.iter().map(|(_, name)| *name).collect();
    names.dedup();
    for &name in OF_SERVER.iter().chain(ABSENT) {
        if !names.contains(&name) {
            names.push(name);
        }
    }
    names
}

// === impl ControllerSelection ===

impl ControllerSelection {
    /// Parses the values of `--controllers`.
    ///
    /// # Errors
    /// [`UnknownController`] if a name is unknown.
    pub fn parse(entries: Vec<String>) -> Result<Self, UnknownController> {
        let entries: Vec<String> = entries.into_iter().map(present).collect();
        let all = known();
        let is_known = |entry: &&String| {
            let name = entry.strip_prefix('-').unwrap_or(entry);
            name == "*" || all.contains(&name)
        };
        match entries.iter().find(|entry| !is_known(entry)) {
            Some(unknown) => Err(UnknownController(unknown.clone())),
            None => Ok(Self { entries }),
        }
    }

    /// Warnings about entries that have no effect with this API server.
    #[must_use]
    pub fn warnings(&self) -> Vec<String> {
        let warning = |entry: &String| match entry.strip_prefix('-') {
            Some(name) if OF_SERVER.contains(&name) => {
                Some(format!("{name} cannot be disabled: the API server does its work"))
            }
            None if ABSENT.contains(&entry.as_str()) => Some(format!("{entry} does not exist here")),
            _ => None,
        };
        self.entries.iter().filter_map(warning).collect()
    }

    /// Removes a controller from the selection, unless an entry is exactly its name.
    #[must_use]
    pub fn without(mut self, name: &str) -> Self {
        if self.entries.is_empty() {
            self.entries.push("*".to_owned());
        }
        if !self.entries.iter().any(|entry| entry == name) {
            self.entries.push(format!("-{name}"));
        }
        self
    }

    /// Removes a controller from the selection, even if an entry is its name.
    #[must_use]
    pub fn never(self, name: &str) -> Self {
        let mut selection = self.without(name);
        for entry in &mut selection.entries {
            if entry.as_str() == name {
                *entry = format!("-{name}");
            }
        }
        selection
    }

    /// Whether no controller runs.
    #[must_use]
    pub fn is_none(&self) -> bool {
        !NAMES.iter().any(|(queue, _)| self.has(queue))
    }

    /// Whether the controller of this queue runs. As upstream, a name takes precedence over `*`.
    pub(crate) fn has(&self, queue: &str) -> bool {
        let name = NAMES.iter().find(|(known, _)| *known == queue).map_or(queue, |(_, name)| name);
        let listed = |wanted: &str| self.entries.iter().any(|entry| entry == wanted);
        if listed(name) {
            return true;
        }
        !listed(&format!("-{name}")) && (self.entries.is_empty() || listed("*"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(text: &str) -> ControllerSelection {
        ControllerSelection::parse(text.split(',').map(str::to_owned).collect()).unwrap()
    }

    #[test]
    fn names_take_precedence_over_the_star() {
        assert!(ControllerSelection::default().has("job") && of("*").has("job"));
        assert!(of("-*").is_none() && !of("*").is_none());
        let some = of("*,-deployment-controller");
        assert!(some.has("job") && !some.has("deployment"));
        let one = of("job-controller");
        assert!(one.has("job") && one.has("job-orphan") && !one.has("deployment"));
        assert!(of("-*,garbage-collector-controller").has("garbage"));
        let without = ControllerSelection::default().without("ip-address-controller");
        assert!(without.has("job") && !without.has("ip-address"));
        assert!(of("ip-address-controller").without("ip-address-controller").has("ip-address"));
    }

    #[test]
    fn a_controller_can_be_removed_even_if_an_entry_is_its_name() {
        let name = "resourcequota-controller";
        assert!(of("*,resourcequota").without(name).has("resource-quota"));
        for text in ["*", "*,resourcequota", "*,-resourcequota"] {
            let selection = of(text).never(name);
            assert!(!selection.has("resource-quota") && selection.has("job"), "{text}");
        }
        assert!(!ControllerSelection::default().never(name).has("resource-quota"));
        assert!(ControllerSelection::default().never(name).has("job"));
        assert!(of(name).never(name).is_none(), "the other controllers stay disabled");
    }

    #[test]
    fn former_names_stand_for_the_present_ones() {
        let former = of("*,bootstrapsigner,tokencleaner,-nodeipam,-job");
        assert!(former.has("bootstrap-signer") && former.has("token-cleaner") && former.has("deployment"));
        assert!(!former.has("pod-cidr") && !former.has("job"));
        for (former, now) in FORMER {
            assert!(known().contains(now), "{former}");
            assert!(!known().contains(former), "{former}");
        }
    }

    #[test]
    fn claims_and_volumes_are_protected_by_controllers_of_their_own() {
        let volumes = of("*,-pvc-protection");
        assert!(volumes.has("volume-protection") && !volumes.has("claim-protection"));
        let claims = of("persistentvolumeclaim-protection-controller");
        assert!(claims.has("claim-protection") && !claims.has("volume-protection"));
    }

    #[test]
    fn entries_without_an_effect_have_warnings() {
        let warned = of(
            "*,-resourcequota,-attachdetach,selinux-warning-controller,-job,resourcepoolstatusrequest-controller",
        );
        let expect = [
            "resourcequota-controller cannot be disabled: the API server does its work",
            "selinux-warning-controller does not exist here",
            "resourcepoolstatusrequest-controller does not exist here",
        ];
        assert_eq!(warned.warnings(), expect);
        assert!(warned.has("deployment"));
        for text in ["*", "-*", "*,resourcequota-controller,-persistentvolume-expander-controller"] {
            assert_eq!(of(text).warnings(), [""; 0], "{text}");
        }
        assert!(
            of("-*,validatingadmissionpolicy-status-controller").is_none(),
            "no controller of this process"
        );
    }

    #[test]
    fn unknown_names_are_refused() {
        for name in ["deployments", "-", "", "--*"] {
            assert!(ControllerSelection::parse(vec![name.to_owned()]).is_err(), "{name:?}");
        }
    }

    #[test]
    fn every_controller_that_is_started_has_a_name() {
        let source = include_str!("run.rs");
        let rows =
            source.split("fn start(").nth(1).and_then(|rest| rest.split("struct Pool").next()).unwrap();
        let names: Vec<_> = rows.lines().filter_map(|line| line.split('"').nth(1)).collect();
        assert!(names.len() > 30, "{names:?}");
        for name in names {
            assert!(NAMES.iter().any(|(queue, _)| *queue == name), "{name}");
        }
    }
}
