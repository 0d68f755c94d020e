//! The one table of what a pod may ask for and this node does not do (yet). Nothing is dropped in silence: what
//! would change what the pod *is* refuses it, the rest is told by an event.

use k8s_openapi::api::core::v1::{Container, Pod, PodSpec, Probe, SeccompProfile};

use super::refuse;
use crate::pod::state::Verdict;

/// What happens to a pod that uses a field.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Then {
    /// It fails, with the field in its message.
    Refuse,
    /// It runs without, and an event says so.
    Tell,
}

type PodField = (&'static str, Then, fn(&PodSpec) -> bool);
type ContainerField = (&'static str, Then, fn(&Container) -> bool);

const POD_FIELDS: [PodField; 13] = [
    ("spec.hostUsers=false", Then::Refuse, |s| s.host_users == Some(false)),
    ("spec.os.name=windows", Then::Refuse, |s| s.os.as_ref().is_some_and(|os| os.name != "linux")),
    ("spec.resourceClaims", Then::Refuse, |s| some(&s.resource_claims)),
    ("spec.runtimeClassName", Then::Refuse, |s| s.runtime_class_name.as_ref().is_some_and(|n| !n.is_empty())),
    ("spec.schedulingGates", Then::Refuse, |s| some(&s.scheduling_gates)),
    ("spec.ephemeralContainers", Then::Tell, |s| some(&s.ephemeral_containers)),
    ("spec.evictionResponders", Then::Tell, |s| some(&s.eviction_responders)),
    ("spec.overhead", Then::Tell, |s| s.overhead.as_ref().is_some_and(|o| !o.is_empty())),
    ("spec.resources", Then::Tell, |s| s.resources.is_some()),
    ("spec.securityContext.appArmorProfile", Then::Refuse, |s| {
        s.security_context
            .as_ref()
            .and_then(|c| c.app_armor_profile.as_ref())
            .is_some_and(|p| p.type_ == "Localhost")
    }),
    ("spec.securityContext.seccompProfile", Then::Refuse, |s| {
        bad_seccomp(s.security_context.as_ref().and_then(|c| c.seccomp_profile.as_ref()))
    }),
    ("spec.securityContext.windowsOptions", Then::Refuse, |s| {
        s.security_context.as_ref().is_some_and(|c| c.windows_options.is_some())
    }),
    ("spec.securityContext.seLinuxChangePolicy", Then::Tell, |s| {
        s.security_context.as_ref().is_some_and(|c| c.se_linux_change_policy.is_some())
    }),
];

const CONTAINER_FIELDS: [ContainerField; 12] = [
    ("volumeDevices", Then::Refuse, |c| some(&c.volume_devices)),
    ("resources.claims", Then::Refuse, |c| c.resources.as_ref().is_some_and(|r| some(&r.claims))),
    ("restartPolicyRules", Then::Refuse, |c| some(&c.restart_policy_rules)),
    ("securityContext.windowsOptions", Then::Refuse, |c| {
        c.security_context.as_ref().is_some_and(|s| s.windows_options.is_some())
    }),
    ("securityContext.appArmorProfile", Then::Refuse, |c| {
        let profile = c.security_context.as_ref().and_then(|s| s.app_armor_profile.as_ref());
        profile.is_some_and(|p| p.type_ == "Localhost")
    }),
    ("securityContext.seccompProfile", Then::Refuse, |c| {
        bad_seccomp(c.security_context.as_ref().and_then(|s| s.seccomp_profile.as_ref()))
    }),
    ("volumeMounts.recursiveReadOnly", Then::Refuse, |c| {
        let mounts = c.volume_mounts.iter().flatten();
        mounts.filter_map(|m| m.recursive_read_only.as_deref()).any(|r| r == "Enabled")
    }),
    ("env.valueFrom.fileKeyRef", Then::Refuse, |c| {
        c.env.iter().flatten().filter_map(|e| e.value_from.as_ref()).any(|v| v.file_key_ref.is_some())
    }),
    ("livenessProbe.grpc", Then::Refuse, |c| grpc(c.liveness_probe.as_ref())),
    ("readinessProbe.grpc", Then::Refuse, |c| grpc(c.readiness_probe.as_ref())),
    ("startupProbe.grpc", Then::Refuse, |c| grpc(c.startup_probe.as_ref())),
    ("resizePolicy", Then::Tell, |c| some(&c.resize_policy) && asks_for_restart(c)),
];

/// Refuses a pod that would not be what it asks to be.
pub(super) fn check(pod: &Pod) -> Result<(), Verdict> {
    let refused = used(pod, Then::Refuse);
    if let Some(spec) = pod.spec.as_ref().filter(|_| refused.is_empty()) {
        return known_policy(spec);
    }
    if refused.is_empty() {
        return Ok(());
    }
    let message = format!("Pod was rejected: this node does not support {}", refused.join(", "));
    Err(refuse("UnsupportedField", message))
}

/// The fields that a pod uses and runs without; for its event.
pub(crate) fn ignored(pod: &Pod) -> Vec<String> {
    used(pod, Then::Tell)
}

/// A per-container restart policy is that of a sidecar, or one that this node does not know.
fn known_policy(spec: &PodSpec) -> Result<(), Verdict> {
    let main = spec.containers.iter().any(|c| c.restart_policy.is_some());
    let inits = spec.init_containers.iter().flatten();
    let init = inits.filter_map(|c| c.restart_policy.as_deref()).any(|policy| policy != "Always");
    if main || init {
        let message = "Pod was rejected: this node does not support containers[*].restartPolicy";
        return Err(refuse("UnsupportedField", message));
    }
    Ok(())
}

fn used(pod: &Pod, then: Then) -> Vec<String> {
    let Some(spec) = &pod.spec else { return Vec::new() };
    let of_pod = POD_FIELDS.iter().filter(|(_, t, used)| *t == then && used(spec)).map(|f| f.0.to_owned());
    let containers = spec.init_containers.iter().flatten().chain(&spec.containers);
    let of_containers = containers.flat_map(|container| {
        let fields = CONTAINER_FIELDS.iter().filter(move |(_, t, used)| *t == then && used(container));
        fields.map(|(name, ..)| format!("containers[{}].{name}", container.name))
    });
    of_pod.chain(of_containers).collect()
}

fn some<T>(list: &Option<Vec<T>>) -> bool {
    list.as_ref().is_some_and(|l| !l.is_empty())
}

fn grpc(probe: Option<&Probe>) -> bool {
    probe.is_some_and(|p| p.grpc.is_some())
}

fn bad_seccomp(profile: Option<&SeccompProfile>) -> bool {
    let Some(profile) = profile else { return false };
    match profile.type_.as_str() {
        "RuntimeDefault" | "Unconfined" => false,
        "Localhost" => {
            // A profile is a file below the node's own directory, and nothing outside of it.
            profile.localhost_profile.as_deref().is_none_or(|path| {
                path.is_empty() || path.starts_with('/') || path.split('/').any(|part| part == "..")
            })
        }
        _ => true,
    }
}

fn asks_for_restart(container: &Container) -> bool {
    container.resize_policy.iter().flatten().any(|p| p.restart_policy == "RestartContainer")
}
