//! The selection of admission plugins: upstream's default set, changed by the flags of kube-apiserver.

use super::{
    Admit, PodSecurityConfig, bootstrap_token, certificate, claim_status, default_tolerations,
    device_admin_access, escalation, limit_ranger, mountable_secrets, namespace_lifecycle, node_restriction,
    node_taints, optional, pod_group, pod_resize, pod_security, policy, priority, runtime_class,
    service_account, storage, webhook,
};

/// The names in `--enable-admission-plugins` and `--disable-admission-plugins`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PluginSelection {
    /// Plugins that run besides the default ones.
    pub enabled: Vec<String>,
    /// Plugins that do not run.
    pub disabled: Vec<String>,
}

/// A member of the chain with the plugin's name and whether it runs by default. A member without a name always runs: it
/// belongs to a kind and is not a plugin.
type Row = (&'static str, bool, Box<dyn Admit>);

/// Names of plugins that run as parts of others here.
const INCLUDED: [(&str, &str); 2] =
    [("CertificateSigning", "CertificateApproval"), ("CertificateSubjectRestriction", "CertificateApproval")];

/// The members that run, in order.
///
/// # Errors
/// The name of an unknown plugin, or of one that is both enabled and disabled.
pub(super) fn chain(
    pod_security: PodSecurityConfig,
    selection: &PluginSelection,
) -> Result<Vec<Box<dyn Admit>>, String> {
    let rows = rows(pod_security);
    let known = |name: &String| {
        rows.iter().any(|row| row.0 == name) || INCLUDED.iter().any(|(included, _)| included == name)
    };
    for name in selection.enabled.iter().chain(&selection.disabled) {
        if name.is_empty() || !known(name) {
            let names: Vec<&str> = rows.iter().map(|row| row.0).filter(|name| !name.is_empty()).collect();
            return Err(format!("unknown admission plugin {name:?}; known are {}", names.join(", ")));
        }
        if selection.enabled.contains(name) && selection.disabled.contains(name) {
            return Err(format!("the admission plugin {name} is both enabled and disabled"));
        }
    }
    let has = |list: &[String], name: &str| {
        list.iter().any(|one| one == name || INCLUDED.contains(&(one.as_str(), name)))
    };
    let runs = |row: &Row| {
        let (name, by_default, _) = row;
        name.is_empty()
            || has(&selection.enabled, name)
            || (*by_default && !selection.disabled.iter().any(|one| one == name))
    };
    Ok(rows.into_iter().filter(runs).map(|row| row.2).collect())
}

fn rows(pod_security: PodSecurityConfig) -> Vec<Row> {
    vec![
        ("NamespaceAutoProvision", false, Box::new(optional::NamespaceAutoProvision)),
        ("NamespaceLifecycle", true, Box::new(namespace_lifecycle::NamespaceLifecycle)),
        ("NamespaceExists", false, Box::new(optional::NamespaceExists)),
        ("SecurityContextDeny", false, Box::new(optional::SecurityContextDeny)),
        ("LimitPodHardAntiAffinityTopology", false, Box::new(optional::HardAntiAffinity)),
        ("PodNodeSelector", false, Box::new(optional::PodNodeSelector)),
        ("AlwaysPullImages", false, Box::new(optional::AlwaysPullImages)),
        ("ServiceAccount", true, Box::new(service_account::ServiceAccount)),
        ("", true, Box::new(mountable_secrets::MountableSecrets)),
        ("LimitRanger", true, Box::new(limit_ranger::LimitRanger)),
        ("Priority", true, Box::new(priority::Priority)),
        ("RuntimeClass", true, Box::new(runtime_class::RuntimeClass)),
        ("DefaultTolerationSeconds", true, Box::new(default_tolerations::DefaultTolerations)),
        ("DefaultStorageClass", true, Box::new(storage::DefaultStorageClass)),
        ("PersistentVolumeClaimResize", true, Box::new(storage::ClaimResize)),
        ("StorageObjectInUseProtection", true, Box::new(storage::InUseProtection)),
        ("PodGroupProtection", true, Box::new(pod_group::PodGroupProtection)),
        ("PodGroupWorkloadExists", true, Box::new(pod_group::PodGroupWorkloadExists)),
        ("ExtendedResourceToleration", false, Box::new(optional::ExtendedResourceToleration)),
        ("DefaultIngressClass", true, Box::new(optional::DefaultIngressClass)),
        ("DenyServiceExternalIPs", false, Box::new(optional::DenyServiceExternalIps)),
        ("OwnerReferencesPermissionEnforcement", false, Box::new(optional::OwnerReferences)),
        ("TaintNodesByCondition", true, Box::new(node_taints::NodeTaints)),
        ("NodeRestriction", true, Box::new(node_restriction::NodeRestriction)),
        ("CertificateApproval", true, Box::new(certificate::Certificates)),
        ("", true, Box::new(bootstrap_token::BootstrapToken)),
        ("", true, Box::new(escalation::Escalation)),
        ("PodSecurity", true, Box::new(pod_security::PodSecurity(pod_security))),
        ("PodResizeValidator", true, Box::new(pod_resize::PodResize)),
        ("MutatingAdmissionPolicy", true, Box::new(policy::MutatingPolicies::new())),
        ("ValidatingAdmissionPolicy", true, Box::new(policy::ValidatingPolicies::new())),
        ("", true, Box::new(webhook::Webhooks::new())),
        ("", true, Box::new(device_admin_access::DeviceAdminAccess)),
        ("", true, Box::new(claim_status::ClaimStatus)),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;

    fn chain_of(enabled: &[&str], disabled: &[&str]) -> Result<usize, String> {
        let own = |names: &[&str]| names.iter().map(|&name| name.to_owned()).collect();
        let selection = PluginSelection { enabled: own(enabled), disabled: own(disabled) };
        chain(PodSecurityConfig::default(), &selection).map(|chain| chain.len())
    }

    #[test]
    fn the_flags_add_and_remove_plugins() {
        let by_default = chain_of(&[], &[]).unwrap();
        assert_eq!(chain_of(&["AlwaysPullImages", "Priority"], &[]), Ok(by_default + 1));
        assert_eq!(chain_of(&[], &["PodSecurity", "LimitRanger"]), Ok(by_default - 2));
        assert_eq!(chain_of(&["CertificateSigning"], &[]), Ok(by_default));
        assert!(chain_of(&["Nothing"], &[]).unwrap_err().contains("known are NamespaceAutoProvision"));
        assert!(chain_of(&["Priority"], &["Priority"]).unwrap_err().contains("both enabled and disabled"));
        assert!(chain_of(&[""], &[]).is_err());
    }
}
