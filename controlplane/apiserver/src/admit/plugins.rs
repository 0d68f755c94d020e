//! The selection of admission plugins: upstream's default set, changed by the flags of kube-apiserver.

use super::{
    Admit, PluginConfigs, Plugins, bootstrap_token, certificate, claim_status, default_tolerations,
    device_admin_access, escalation, initializers, limit_ranger, limited_resources, mountable_secrets,
    namespace_lifecycle, node_restriction, node_taints, optional, pod_groups, pod_resize, pod_security,
    policy, priority, runtime_class, service_account, storage, webhook,
};
use crate::{
    admit::member::{Member, Steps},
    remote::identities::Identities,
};

/// The names in `--enable-admission-plugins` and `--disable-admission-plugins`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PluginSelection {
    /// Plugins that run in addition to the default plugins.
    pub enabled: Vec<String>,
    /// Plugins that do not run.
    pub disabled: Vec<String>,
}

/// A member of the chain. A plugin may have several members.
struct Row {
    /// The name of the plugin. A member without a name always runs: it implements rules of a kind.
    name: &'static str,
    runs_by_default: bool,
    member: Member,
}

/// The plugin that charges quotas. It is a stage of the write pipeline (`quota.rs`), not a member of the chain.
const QUOTA: &str = "ResourceQuota";
const MUTATING_WEBHOOKS: &str = "MutatingAdmissionWebhook";
const VALIDATING_WEBHOOKS: &str = "ValidatingAdmissionWebhook";

/// Plugins that are on by default and have no member in the chain. ClusterTrustBundleAttest checks ClusterTrustBundles,
/// which are not served, so it has no effect.
const WITHOUT_MEMBER: [&str; 2] = [QUOTA, "ClusterTrustBundleAttest"];

/// Plugins that upstream keeps for old command lines.
const DEPRECATED: [&str; 2] = ["AlwaysAdmit", "AlwaysDeny"];

/// The plugins that have a configuration.
struct Configured {
    pod_security: pod_security::PodSecurity,
    node_selector: optional::PodNodeSelector,
    toleration_restriction: optional::PodTolerationRestriction,
    event_rate_limit: optional::EventRateLimit,
    image_policy: optional::ImagePolicyWebhook,
    mutating_webhooks: Identities,
    validating_webhooks: Identities,
}

/// Creates the chain of the plugins that run, in order.
///
/// # Errors
/// A name is unknown, a plugin is both enabled and disabled, or a configuration is invalid.
pub(super) fn chain(mut configs: PluginConfigs, selection: &PluginSelection) -> Result<Plugins, String> {
    let limited = configured(QUOTA, true, selection, || limited_resources::read(&mut configs, QUOTA))?;
    let rows = rows(Configured::read(&mut configs, selection)?);
    for plugin in configs.unused() {
        tracing::warn!(plugin, "ignoring the configuration of a disabled admission plugin");
    }
    selection.check(&rows)?;
    let running = rows.into_iter().filter(|row| selection.runs(row.name, row.runs_by_default));
    let members = running.map(|row| row.member).collect();
    Ok(Plugins { members, charges_quota: selection.runs(QUOTA, true), limited })
}

// === impl PluginSelection ===

impl PluginSelection {
    /// Whether the configuration enables a plugin that is disabled by default.
    pub(crate) fn enables(&self, name: &str) -> bool {
        self.enabled.iter().any(|enabled| enabled == name)
    }

    fn runs(&self, name: &str, by_default: bool) -> bool {
        let has = |list: &[String]| list.iter().any(|one| one == name);
        name.is_empty() || has(&self.enabled) || (by_default && !has(&self.disabled))
    }

    /// Checks the names of the plugins.
    fn check(&self, rows: &[Row]) -> Result<(), String> {
        let named = rows.iter().map(|row| row.name).filter(|name| !name.is_empty());
        let known: std::collections::BTreeSet<&str> = named.chain(WITHOUT_MEMBER).collect();
        for name in self.enabled.iter().chain(&self.disabled).map(String::as_str) {
            if !known.contains(name) {
                let known: Vec<&str> = known.into_iter().collect();
                return Err(format!("unknown admission plugin {name:?}; known are {}", known.join(", ")));
            }
            let is_enabled = self.enabled.iter().any(|enabled| enabled == name);
            if is_enabled && self.disabled.iter().any(|disabled| disabled == name) {
                return Err(format!("the admission plugin {name} is both enabled and disabled"));
            }
            if is_enabled && DEPRECATED.contains(&name) {
                tracing::warn!(
                    plugin = name,
                    "the admission plugin is deprecated; remove it from the settings"
                );
            }
        }
        Ok(())
    }
}

// === impl Configured ===

impl Configured {
    /// Reads the configurations of the plugins that run.
    fn read(configs: &mut PluginConfigs, selection: &PluginSelection) -> Result<Self, String> {
        Ok(Self {
            pod_security: configured("PodSecurity", true, selection, || {
                pod_security::PodSecurityConfig::read(configs).map(pod_security::PodSecurity)
            })?,
            node_selector: configured("PodNodeSelector", false, selection, || {
                optional::PodNodeSelector::read(configs)
            })?,
            toleration_restriction: configured("PodTolerationRestriction", false, selection, || {
                optional::PodTolerationRestriction::read(configs)
            })?,
            event_rate_limit: configured("EventRateLimit", false, selection, || {
                optional::EventRateLimit::read(configs)
            })?,
            image_policy: configured("ImagePolicyWebhook", false, selection, || {
                optional::ImagePolicyWebhook::read(configs)
            })?,
            mutating_webhooks: configured(MUTATING_WEBHOOKS, true, selection, || {
                webhook::identities(configs, MUTATING_WEBHOOKS)
            })?,
            validating_webhooks: configured(VALIDATING_WEBHOOKS, true, selection, || {
                webhook::identities(configs, VALIDATING_WEBHOOKS)
            })?,
        })
    }
}

/// Reads a plugin with its configuration if it runs. Otherwise returns the default.
fn configured<P: Default>(
    name: &str,
    by_default: bool,
    selection: &PluginSelection,
    read: impl FnOnce() -> Result<P, String>,
) -> Result<P, String> {
    if !selection.runs(name, by_default) {
        return Ok(P::default());
    }
    read().map_err(|why| format!("the configuration of {name}: {why}"))
}

fn row(name: &'static str, runs_by_default: bool, steps: Steps, plugin: impl Admit + 'static) -> Row {
    Row { name, runs_by_default, member: Member::new(name, steps, Box::new(plugin)) }
}

/// All members, in order.
fn rows(configured: Configured) -> Vec<Row> {
    use Steps::{Both, Mutate, Validate};
    let mutating = webhook::MutatingWebhooks::new(configured.mutating_webhooks);
    let validating = webhook::ValidatingWebhooks::new(configured.validating_webhooks);
    vec![
        row("AlwaysAdmit", false, Validate, optional::AlwaysAdmit),
        row("NamespaceAutoProvision", false, Mutate, optional::NamespaceAutoProvision),
        row("NamespaceLifecycle", true, Validate, namespace_lifecycle::NamespaceLifecycle),
        row("NamespaceExists", false, Validate, optional::NamespaceExists),
        row("SecurityContextDeny", false, Validate, optional::SecurityContextDeny),
        row("LimitPodHardAntiAffinityTopology", false, Validate, optional::HardAntiAffinity),
        row("InitialResources", false, Mutate, optional::InitialResources),
        row("PodNodeSelector", false, Both, configured.node_selector),
        row("AlwaysPullImages", false, Both, optional::AlwaysPullImages),
        row("ImagePolicyWebhook", false, Validate, configured.image_policy),
        row("ServiceAccount", true, Mutate, service_account::ServiceAccount),
        row("ServiceAccount", true, Validate, mountable_secrets::MountableSecrets),
        row("LimitRanger", true, Both, limit_ranger::LimitRanger),
        row("Priority", true, Both, priority::Priority),
        row("RuntimeClass", true, Both, runtime_class::RuntimeClass),
        row("DefaultTolerationSeconds", true, Mutate, default_tolerations::DefaultTolerations),
        row("PodTolerationRestriction", false, Both, configured.toleration_restriction),
        row("EventRateLimit", false, Validate, configured.event_rate_limit),
        row("DefaultStorageClass", true, Mutate, storage::DefaultStorageClass),
        row("PersistentVolumeClaimResize", true, Validate, storage::ClaimResize),
        row("StorageObjectInUseProtection", true, Mutate, storage::InUseProtection),
        row("PodGroupProtection", true, Mutate, pod_groups::Protection),
        row("ExtendedResourceToleration", false, Mutate, optional::ExtendedResourceToleration),
        row("DefaultIngressClass", true, Mutate, optional::DefaultIngressClass),
        row("DenyServiceExternalIPs", false, Validate, optional::DenyServiceExternalIps),
        row("OwnerReferencesPermissionEnforcement", false, Validate, optional::OwnerReferences),
        row("TaintNodesByCondition", true, Mutate, node_taints::NodeTaints),
        row("NodeRestriction", true, Validate, node_restriction::NodeRestriction),
        row("", true, Mutate, certificate::Requests),
        row("CertificateApproval", true, Validate, certificate::Approval),
        row("CertificateSigning", true, Validate, certificate::Signing),
        row("CertificateSubjectRestriction", true, Validate, certificate::SubjectRestriction),
        row("", true, Validate, bootstrap_token::BootstrapToken),
        row("", true, Validate, escalation::Escalation),
        row("PodSecurity", true, Validate, configured.pod_security),
        row("PodTopologyLabels", true, Mutate, optional::PodTopologyLabels),
        row("PodGroupWorkloadExists", true, Validate, pod_groups::WorkloadExists),
        row("NodeDeclaredFeatureValidator", true, Validate, optional::NodeDeclaredFeatures),
        row("JobValidation", true, Validate, pod_groups::JobValidation),
        row("PodResizeValidator", true, Validate, pod_resize::PodResize),
        row("MutatingAdmissionPolicy", true, Mutate, policy::MutatingPolicies::new()),
        row(MUTATING_WEBHOOKS, true, Mutate, mutating),
        row("ValidatingAdmissionPolicy", true, Validate, policy::ValidatingPolicies::new()),
        row(VALIDATING_WEBHOOKS, true, Validate, validating),
        row("Initializers", false, Mutate, initializers::Initializers::default()),
        row("", true, Validate, device_admin_access::DeviceAdminAccess),
        row("", true, Validate, claim_status::ClaimStatus),
        row("AlwaysDeny", false, Both, optional::AlwaysDeny),
    ]
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    /// `AllOrderedPlugins` of kube-apiserver 1.36 (`pkg/kubeapiserver/options/plugins.go`).
    const UPSTREAM: [&str; 41] = [
        "AlwaysAdmit",
        "NamespaceAutoProvision",
        "NamespaceLifecycle",
        "NamespaceExists",
        "LimitPodHardAntiAffinityTopology",
        "LimitRanger",
        "ServiceAccount",
        "NodeRestriction",
        "TaintNodesByCondition",
        "AlwaysPullImages",
        "ImagePolicyWebhook",
        "PodSecurity",
        "PodNodeSelector",
        "Priority",
        "DefaultTolerationSeconds",
        "PodTolerationRestriction",
        "EventRateLimit",
        "ExtendedResourceToleration",
        "DefaultStorageClass",
        "StorageObjectInUseProtection",
        "PodGroupProtection",
        "OwnerReferencesPermissionEnforcement",
        "PersistentVolumeClaimResize",
        "RuntimeClass",
        "CertificateApproval",
        "CertificateSigning",
        "ClusterTrustBundleAttest",
        "CertificateSubjectRestriction",
        "DefaultIngressClass",
        "DenyServiceExternalIPs",
        "PodTopologyLabels",
        "PodGroupWorkloadExists",
        "NodeDeclaredFeatureValidator",
        "JobValidation",
        "PodResizeValidator",
        "MutatingAdmissionPolicy",
        "MutatingAdmissionWebhook",
        "ValidatingAdmissionPolicy",
        "ValidatingAdmissionWebhook",
        "ResourceQuota",
        "AlwaysDeny",
    ];

    /// Plugins that are off by default: `DefaultOffAdmissionPlugins` of the same file.
    const OFF_UPSTREAM: [&str; 14] = [
        "AlwaysAdmit",
        "AlwaysDeny",
        "AlwaysPullImages",
        "DenyServiceExternalIPs",
        "EventRateLimit",
        "ExtendedResourceToleration",
        "ImagePolicyWebhook",
        "LimitPodHardAntiAffinityTopology",
        "NamespaceAutoProvision",
        "NamespaceExists",
        "NodeRestriction",
        "OwnerReferencesPermissionEnforcement",
        "PodNodeSelector",
        "PodTolerationRestriction",
    ];

    fn plugins_of(enabled: &[&str], disabled: &[&str]) -> Result<Plugins, String> {
        let own = |names: &[&str]| names.iter().map(|&name| name.to_owned()).collect();
        let selection = PluginSelection { enabled: own(enabled), disabled: own(disabled) };
        chain(PluginConfigs::default(), &selection)
    }

    fn chain_of(enabled: &[&str], disabled: &[&str]) -> Result<usize, String> {
        plugins_of(enabled, disabled).map(|plugins| plugins.members.len())
    }

    fn refusal(enabled: &[&str], disabled: &[&str]) -> String {
        chain_of(enabled, disabled).unwrap_err()
    }

    #[test]
    fn the_flags_add_and_remove_plugins() {
        let by_default = chain_of(&[], &[]).unwrap();
        assert_eq!(chain_of(&["AlwaysPullImages", "Priority"], &[]), Ok(by_default + 1));
        assert_eq!(chain_of(&[], &["PodSecurity", "LimitRanger"]), Ok(by_default - 2));
        assert_eq!(chain_of(&["CertificateSigning"], &[]), Ok(by_default));
        assert_eq!(chain_of(&[], &["CertificateSigning", "MutatingAdmissionWebhook"]), Ok(by_default - 2));
        // The plugin has two members.
        assert_eq!(chain_of(&[], &["ServiceAccount"]), Ok(by_default - 2));
        assert!(refusal(&["Nothing"], &[]).contains("known are AlwaysAdmit, AlwaysDeny, AlwaysPullImages"));
        assert!(refusal(&["Priority"], &["Priority"]).contains("both enabled and disabled"));
        assert!(chain_of(&[""], &[]).is_err());
    }

    #[test]
    fn the_default_plugins_are_those_of_upstream_and_node_restriction() {
        let (mut configs, selection) = (PluginConfigs::default(), PluginSelection::default());
        let rows = rows(Configured::read(&mut configs, &selection).unwrap());
        let named = rows.iter().filter(|row| row.runs_by_default && !row.name.is_empty());
        let ours: BTreeSet<&str> = named.map(|row| row.name).chain(WITHOUT_MEMBER).collect();
        let is_on = |name: &&str| !OFF_UPSTREAM.contains(name) || *name == "NodeRestriction";
        let upstream: BTreeSet<&str> = UPSTREAM.into_iter().filter(is_on).collect();
        assert_eq!(ours, upstream);
        assert!(OFF_UPSTREAM.iter().all(|name| UPSTREAM.contains(name)));
    }

    #[test]
    fn every_name_of_upstream_is_known() {
        for name in UPSTREAM {
            assert!(chain_of(&[], &[name]).is_ok(), "{name}");
            let says = match name {
                "EventRateLimit" => Some("the configuration of EventRateLimit: limits: "),
                "ImagePolicyWebhook" => Some("the configuration of ImagePolicyWebhook: no config specified"),
                _ => None,
            };
            match (chain_of(&[name], &[]), says) {
                (Ok(_), None) => {}
                (Err(why), Some(says)) => assert!(why.contains(says), "{name}: {why}"),
                (other, _) => panic!("{name}: {other:?}"),
            }
        }
        assert!(plugins_of(&[], &[]).unwrap().charges_quota);
        assert!(!plugins_of(&[], &["ResourceQuota"]).unwrap().charges_quota);
    }
}
