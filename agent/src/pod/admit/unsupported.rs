//! The table of pod fields that this node does not support. If a pod would behave differently without such a field, the
//! pod is rejected. Other fields are reported by an event. No field is dropped silently.
//!
//! Two kinds of fields are handled elsewhere. As upstream, a volume of an unsupported type keeps its pod waiting with
//! a `FailedMount` event (`volume.rs`). An unsafe sysctl is rejected by `sysctls.rs`.

use coracle_cri::labels_containers;
use k8s_openapi::api::core::v1::{Container, LifecycleHandler, Pod, PodSpec, Probe, SeccompProfile, Volume};

use super::input::refuse;
use crate::pod::state::Verdict;

/// Reason of rejections and events.
pub(crate) const UNSUPPORTED: &str = "UnsupportedField";

/// The treatment of a pod that uses an unsupported field.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Handling {
    /// The pod is rejected, with the field in the message.
    Reject,
    /// The pod runs without the field, and an event reports that.
    Report,
}

type PodField = (&'static str, Handling, fn(&PodSpec) -> bool);
type VolumeField = (&'static str, Handling, fn(&Volume) -> bool);
type ContainerField = (&'static str, Handling, fn(&Container) -> bool);

const POD_FIELDS: [PodField; 8] = [
    ("spec.schedulingGates", Handling::Reject, |s| some(&s.scheduling_gates)),
    ("spec.evictionResponders", Handling::Report, |s| some(&s.eviction_responders)),
    ("spec.overhead", Handling::Report, |s| s.overhead.as_ref().is_some_and(|o| !o.is_empty())),
    ("spec.securityContext.appArmorProfile", Handling::Report, |s| {
        let profile = s.security_context.as_ref().and_then(|c| c.app_armor_profile.as_ref());
        profile.is_some_and(|p| p.type_ == "RuntimeDefault") && !has_apparmor()
    }),
    ("spec.securityContext.seLinuxOptions", Handling::Report, |s| {
        s.security_context.as_ref().is_some_and(|c| c.se_linux_options.is_some()) && !labels_containers()
    }),
    ("spec.securityContext.seccompProfile", Handling::Reject, |s| {
        bad_seccomp(s.security_context.as_ref().and_then(|c| c.seccomp_profile.as_ref()))
    }),
    ("spec.securityContext.windowsOptions", Handling::Report, |s| {
        s.security_context.as_ref().is_some_and(|c| c.windows_options.is_some())
    }),
    ("spec.securityContext.seLinuxChangePolicy", Handling::Report, |s| {
        s.security_context.as_ref().is_some_and(|c| c.se_linux_change_policy.is_some())
    }),
];

const VOLUME_FIELDS: [VolumeField; 2] = [
    ("defaultUser", Handling::Reject, |v| {
        let users = [
            v.config_map.as_ref().and_then(|m| m.default_user),
            v.secret.as_ref().and_then(|s| s.default_user),
            v.downward_api.as_ref().and_then(|d| d.default_user),
            v.projected.as_ref().and_then(|p| p.default_user),
        ];
        users.iter().any(Option::is_some)
    }),
    ("items.user", Handling::Reject, item_users),
];

const CONTAINER_FIELDS: [ContainerField; 10] = [
    ("volumeDevices", Handling::Reject, |c| some(&c.volume_devices)),
    ("securityContext.windowsOptions", Handling::Report, |c| {
        c.security_context.as_ref().is_some_and(|s| s.windows_options.is_some())
    }),
    ("securityContext.appArmorProfile", Handling::Report, |c| {
        let profile = c.security_context.as_ref().and_then(|s| s.app_armor_profile.as_ref());
        profile.is_some_and(|p| p.type_ == "RuntimeDefault") && !has_apparmor()
    }),
    ("securityContext.seLinuxOptions", Handling::Report, |c| {
        c.security_context.as_ref().is_some_and(|s| s.se_linux_options.is_some()) && !labels_containers()
    }),
    ("securityContext.seccompProfile", Handling::Reject, |c| {
        bad_seccomp(c.security_context.as_ref().and_then(|s| s.seccomp_profile.as_ref()))
    }),
    ("livenessProbe.httpGet.protocol", Handling::Reject, |c| http_protocol(c.liveness_probe.as_ref())),
    ("readinessProbe.httpGet.protocol", Handling::Reject, |c| http_protocol(c.readiness_probe.as_ref())),
    ("startupProbe.httpGet.protocol", Handling::Reject, |c| http_protocol(c.startup_probe.as_ref())),
    ("lifecycle.httpGet.protocol", Handling::Reject, |c| {
        let mut gets = hooks(c).filter_map(|h| h.http_get.as_ref());
        gets.any(|get| get.protocol.as_ref().is_some_and(|p| p != "HTTP/1.1"))
    }),
    ("lifecycle.tcpSocket", Handling::Report, |c| hooks(c).any(|h| h.tcp_socket.is_some())),
];

/// Rejects a pod with a field that changes its meaning.
pub(super) fn check(pod: &Pod) -> Result<(), Verdict> {
    let refused = used(pod, Handling::Reject);
    if refused.is_empty() {
        return Ok(());
    }
    let message = format!("Pod was rejected: this node does not support {}", joined(&refused));
    Err(refuse(UNSUPPORTED, message))
}

/// The fields as text. A pod can have thousands of them, and its status must stay small.
fn joined(fields: &[String]) -> String {
    const SHOWN: usize = 20;
    let shown = fields.iter().take(SHOWN).cloned().collect::<Vec<_>>().join(", ");
    match fields.len().saturating_sub(SHOWN) {
        0 => shown,
        more => format!("{shown} and {more} more fields"),
    }
}

/// Rejects an ephemeral container with a field that changes its meaning. The pod continues without the container.
pub(crate) fn check_added(container: &Container) -> Result<(), String> {
    let refused: Vec<_> = fields_of(container, Handling::Reject).collect();
    match refused.as_slice() {
        [] => Ok(()),
        fields => Err(format!("this node does not support {}", fields.join(", "))),
    }
}

/// The ignored fields of an ephemeral container, for its event.
pub(crate) fn ignored_by(container: &Container) -> Vec<String> {
    fields_of(container, Handling::Report).collect()
}

/// The ignored fields of a pod, for its event.
pub(crate) fn ignored(pod: &Pod) -> Vec<String> {
    used(pod, Handling::Report)
}

fn used(pod: &Pod, then: Handling) -> Vec<String> {
    let Some(spec) = &pod.spec else { return Vec::new() };
    let of_pod = POD_FIELDS.iter().filter(|(_, t, used)| *t == then && used(spec)).map(|f| f.0.to_owned());
    let containers = spec.init_containers.iter().flatten().chain(&spec.containers);
    let of_containers = containers.flat_map(|container| fields_of(container, then));
    let of_volumes = spec.volumes.iter().flatten().flat_map(|volume| {
        let fields = VOLUME_FIELDS.iter().filter(move |(_, t, used)| *t == then && used(volume));
        fields.map(|(name, ..)| format!("volumes[{}].{name}", volume.name))
    });
    of_pod.chain(of_volumes).chain(of_containers).collect()
}

fn fields_of(container: &Container, then: Handling) -> impl Iterator<Item = String> {
    let fields = CONTAINER_FIELDS.iter().filter(move |(_, t, used)| *t == then && used(container));
    fields.map(|(name, ..)| format!("containers[{}].{name}", container.name))
}

/// Whether the kernel has AppArmor. Without it a default profile is ignored, and the runtime rejects a named profile.
fn has_apparmor() -> bool {
    let enabled = std::fs::read_to_string("/sys/module/apparmor/parameters/enabled");
    enabled.is_ok_and(|text| text.trim() == "Y")
}

fn some<T>(list: &Option<Vec<T>>) -> bool {
    list.as_ref().is_some_and(|l| !l.is_empty())
}

/// Whether an item of the volume sets an owner.
fn item_users(volume: &Volume) -> bool {
    let own = volume.config_map.iter().flat_map(|m| m.items.iter().flatten());
    let mut keys = own.chain(volume.secret.iter().flat_map(|s| s.items.iter().flatten()));
    let mut fields = volume.downward_api.iter().flat_map(|d| d.items.iter().flatten());
    let projected = || volume.projected.iter().flat_map(|p| p.sources.iter().flatten());
    keys.any(|k| k.user.is_some())
        || fields.any(|f| f.user.is_some())
        || projected().any(|source| {
            let maps = source.config_map.iter().flat_map(|m| m.items.iter().flatten());
            let mut keys = maps.chain(source.secret.iter().flat_map(|s| s.items.iter().flatten()));
            let mut fields = source.downward_api.iter().flat_map(|d| d.items.iter().flatten());
            let token = source.service_account_token.as_ref();
            keys.any(|k| k.user.is_some())
                || fields.any(|f| f.user.is_some())
                || token.is_some_and(|t| t.user.is_some())
        })
}

fn hooks(container: &Container) -> impl Iterator<Item = &LifecycleHandler> {
    container.lifecycle.iter().flat_map(|l| l.post_start.iter().chain(&l.pre_stop))
}

fn http_protocol(probe: Option<&Probe>) -> bool {
    let protocol = probe.and_then(|p| p.http_get.as_ref()).and_then(|get| get.protocol.as_ref());
    protocol.is_some_and(|p| p != "HTTP/1.1")
}

fn bad_seccomp(profile: Option<&SeccompProfile>) -> bool {
    let Some(profile) = profile else { return false };
    match profile.type_.as_str() {
        "RuntimeDefault" | "Unconfined" => false,
        "Localhost" => {
            // The profile must be below the node's profile directory.
            profile.localhost_profile.as_deref().is_none_or(|path| {
                path.is_empty() || path.starts_with('/') || path.split('/').any(|part| part == "..")
            })
        }
        _ => true,
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn found(spec: Value) -> (Vec<String>, Vec<String>) {
        let pod: Pod = serde_json::from_value(json!({"spec": spec})).unwrap();
        (used(&pod, Handling::Reject), used(&pod, Handling::Report))
    }

    /// A pod with one additional field, and the findings about it.
    fn of_pod(field: &str, value: Value) -> (Vec<String>, Vec<String>) {
        let mut spec = json!({"containers": [{"name": "c"}]});
        spec[field] = value;
        found(spec)
    }

    fn of_container(field: &str, value: Value) -> (Vec<String>, Vec<String>) {
        let mut container = json!({"name": "c"});
        container[field] = value;
        found(json!({"containers": [container]}))
    }

    fn of_volume(field: &str, value: Value) -> (Vec<String>, Vec<String>) {
        let mut volume = json!({"name": "v"});
        volume[field] = value;
        found(json!({"containers": [{"name": "c"}], "volumes": [volume]}))
    }

    #[test]
    fn fields_that_change_the_meaning_are_rejected() {
        let get = json!({"httpGet": {"port": 1, "protocol": "HTTP/2"}});
        let key = |user| json!([{"key": "k", "path": "p", "user": user}]);
        for ((refused, reported), name) in [
            (of_pod("schedulingGates", json!([{"name": "g"}])), "spec.schedulingGates"),
            (of_container("volumeDevices", json!([{"devicePath": "/d", "name": "v"}])), "volumeDevices"),
            (of_container("livenessProbe", get.clone()), "livenessProbe.httpGet.protocol"),
            (of_container("readinessProbe", get.clone()), "readinessProbe.httpGet.protocol"),
            (of_container("lifecycle", json!({"preStop": get})), "lifecycle.httpGet.protocol"),
            (of_volume("configMap", json!({"name": "m", "defaultUser": 1})), "defaultUser"),
            (of_volume("secret", json!({"items": key(1)})), "items.user"),
            (of_volume("projected", json!({"sources": [{"secret": {"items": key(1)}}]})), "items.user"),
        ] {
            assert!(matches!(refused.as_slice(), [one] if one.ends_with(name)), "{name}: {refused:?}");
            assert_eq!(reported, Vec::<String>::new(), "{name}");
        }
    }

    #[test]
    fn ephemeral_containers_are_checked_like_other_containers() {
        let added = |fields: Value| serde_json::from_value::<Container>(fields).unwrap();
        let seccomp = json!({"seccompProfile": {"type": "Localhost", "localhostProfile": "../p"}});
        let seccomp = added(json!({"name": "d", "securityContext": seccomp}));
        assert!(check_added(&seccomp).unwrap_err().ends_with("containers[d].securityContext.seccompProfile"));
        let bare = added(json!({"name": "d"}));
        assert_eq!((check_added(&bare), ignored_by(&bare)), (Ok(()), Vec::new()));
        let hooked = json!({"name": "d", "lifecycle": {"postStart": {"tcpSocket": {"port": 1}}}});
        assert_eq!(ignored_by(&added(hooked)), ["containers[d].lifecycle.tcpSocket"]);
    }

    #[test]
    fn ignored_fields_are_reported() {
        for ((refused, reported), name) in [
            (of_pod("overhead", json!({"cpu": "1"})), "spec.overhead"),
            // Pods for both Linux and Windows set these options, and a kubelet on Linux ignores them.
            (of_pod("securityContext", json!({"windowsOptions": {}})), "spec.securityContext.windowsOptions"),
            (
                of_container("securityContext", json!({"windowsOptions": {"runAsUserName": "u"}})),
                "securityContext.windowsOptions",
            ),
            (
                of_container("securityContext", json!({"seLinuxOptions": {"level": "s0"}})),
                "securityContext.seLinuxOptions",
            ),
        ] {
            assert!(matches!(reported.as_slice(), [one] if one.ends_with(name)), "{name}: {reported:?}");
            assert_eq!(refused, Vec::<String>::new(), "{name}");
        }
    }

    #[test]
    fn a_default_profile_is_reported_without_apparmor() {
        let (refused, reported) =
            of_container("securityContext", json!({"appArmorProfile": {"type": "RuntimeDefault"}}));
        assert_eq!((refused.len(), reported.is_empty()), (0, has_apparmor()), "{reported:?}");
    }

    #[test]
    fn supported_fields_are_not_reported() {
        let nothing = (Vec::new(), Vec::new());
        assert_eq!(of_pod("hostUsers", json!(false)), nothing);
        assert_eq!(of_pod("runtimeClassName", json!("gvisor")), nothing);
        assert_eq!(of_pod("resourceClaims", json!([{"name": "r"}])), nothing);
        assert_eq!(of_pod("resources", json!({"limits": {"cpu": "1"}})), nothing);
        assert_eq!(of_container("resources", json!({"claims": [{"name": "r"}]})), nothing);
        assert_eq!(of_pod("securityContext", json!({"appArmorProfile": {"type": "Unconfined"}})), nothing);
        assert_eq!(
            of_volume("emptyDir", json!({"sizeLimit": "1Mi", "medium": "Memory", "mode": 448})),
            nothing
        );
        assert_eq!(of_volume("secret", json!({"items": [{"key": "k", "path": "p"}]})), nothing);
        assert_eq!(
            of_container(
                "livenessProbe",
                json!({"httpGet": {"port": 1}, "terminationGracePeriodSeconds": 1})
            ),
            nothing
        );
        let file = json!({"fileKeyRef": {"volumeName": "v", "path": "p", "key": "K"}});
        assert_eq!(of_container("env", json!([{"name": "A", "valueFrom": file}])), nothing);
        let rules =
            json!([{"action": "RestartAllContainers", "exitCodes": {"operator": "In", "values": [1]}}]);
        assert_eq!(of_container("restartPolicyRules", rules), nothing);
        assert_eq!(of_container("restartPolicy", json!("Never")), nothing);
        let spread = json!([{"maxSkew": 1, "topologyKey": "t", "whenUnsatisfiable": "ScheduleAnyway"}]);
        assert_eq!(of_pod("topologySpreadConstraints", spread), nothing);
    }

    #[test]
    fn a_rejection_names_a_limited_number_of_fields() {
        let names = |count: usize| -> Vec<String> { (0..count).map(|n| format!("f{n}")).collect() };
        assert_eq!(joined(&names(2)), "f0, f1");
        assert!(joined(&names(10_000)).ends_with("f19 and 9980 more fields"));
    }
}
