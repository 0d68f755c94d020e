//! CRI configuration of a container.

use std::collections::{BTreeMap, HashMap};
use std::path::PathBuf;

use coracle_proto::cri;
use coracle_values::CollectMap;
use k8s_openapi::api::core::v1::{Container, Lifecycle, Pod};
use sha2::{Digest, Sha256};

use super::{CONTAINER_NAME, GRACE, MESSAGE_PATH, MESSAGE_POLICY, RESOURCES, identity};
use crate::cgroup::effective_resources;
use crate::pod::env::{BYTES_MAX, EnvError, expand};

/// Parts of a container's configuration that are computed before the configuration.
pub(crate) struct Parts {
    pub(crate) attempt: u32,
    pub(crate) image_id: String,
    pub(crate) env: Vec<(String, String)>,
    pub(crate) mounts: Vec<cri::Mount>,
    pub(crate) resources: cri::LinuxContainerResources,
    pub(crate) security: cri::LinuxContainerSecurityContext,
    /// Devices of the node that the container gets.
    pub(crate) devices: Vec<cri::Device>,
    /// CDI ids of its devices.
    pub(crate) cdi_devices: Vec<String>,
    /// Annotations of its devices. Annotations of the agent take precedence.
    pub(crate) annotations: BTreeMap<String, String>,
}

/// The configuration of a container.
///
/// # Errors
/// When the command and its arguments are larger than the kernel accepts.
pub(crate) fn config(
    pod: &Pod,
    container: &Container,
    parts: Parts,
) -> Result<cri::ContainerConfig, EnvError> {
    let (command, args) = expanded(container, &parts.env)?;
    let mut labels = identity(pod);
    labels.insert(CONTAINER_NAME.to_owned(), container.name.clone());
    Ok(cri::ContainerConfig {
        metadata: Some(cri::ContainerMetadata { name: container.name.clone(), attempt: parts.attempt }),
        image: Some(cri::ImageSpec {
            image: parts.image_id,
            user_specified_image: container.image.clone().unwrap_or_default(),
            ..cri::ImageSpec::default()
        }),
        command,
        args,
        working_dir: container.working_dir.clone().unwrap_or_default(),
        envs: parts
            .env
            .iter()
            .map(|(key, value)| cri::KeyValue { key: key.clone(), value: value.clone().into_bytes() })
            .collect(),
        mounts: parts.mounts,
        devices: parts.devices,
        cdi_devices: parts.cdi_devices.into_iter().map(|name| cri::CdiDevice { name }).collect(),
        labels,
        annotations: parts
            .annotations
            .into_iter()
            .chain(annotations(pod, container, parts.attempt))
            .collect(),
        log_path: format!("{}/{}.log", container.name, parts.attempt),
        stdin: container.stdin == Some(true),
        stdin_once: container.stdin_once == Some(true),
        tty: container.tty == Some(true),
        linux: Some(cri::LinuxContainerConfig {
            resources: Some(parts.resources),
            security_context: Some(parts.security),
        }),
        stop_signal: stop_signal(container.lifecycle.as_ref()).into(),
        ..cri::ContainerConfig::default()
    })
}

/// The command and its arguments with the values of variables.
fn expanded(container: &Container, env: &[(String, String)]) -> Result<(Vec<String>, Vec<String>), EnvError> {
    let values: BTreeMap<&str, &str> = env.iter().map(|(name, value)| (&**name, &**value)).collect_map();
    let mut left = BYTES_MAX;
    let mut each = |text: &String| {
        let text = expand(text, left, |name| values.get(name).copied())?;
        left -= text.len();
        Ok(text)
    };
    let command = container.command.iter().flatten().map(&mut each).collect::<Result<_, EnvError>>()?;
    let args = container.args.iter().flatten().map(&mut each).collect::<Result<_, EnvError>>()?;
    Ok((command, args))
}

/// Path of the container's termination message.
pub(crate) fn message_path(container: &Container) -> PathBuf {
    PathBuf::from(container.termination_message_path.as_deref().unwrap_or("/dev/termination-log"))
}

fn annotations(pod: &Pod, container: &Container, attempt: u32) -> HashMap<String, String> {
    let spec = pod.spec.as_ref();
    let mut all: HashMap<String, String> = HashMap::new();
    let mut put = |key: &str, value: String| all.insert(key.to_owned(), value);
    // The hash is only for tools that read the annotation. The agent never compares it.
    let hash = serde_json::to_vec(container).map(Sha256::digest).unwrap_or_default();
    put("io.kubernetes.container.hash", hex::encode(&hash[..4]));
    put("io.kubernetes.container.restartCount", attempt.to_string());
    put(MESSAGE_PATH, message_path(container).to_string_lossy().into_owned());
    put(MESSAGE_POLICY, container.termination_message_policy.clone().unwrap_or_else(|| "File".to_owned()));
    put(GRACE, spec.and_then(|s| s.termination_grace_period_seconds).unwrap_or(30).to_string());
    if let Some(seconds) = pod.metadata.deletion_grace_period_seconds {
        put("io.kubernetes.pod.deletionGracePeriod", seconds.to_string());
    }
    let pod_level = spec.and_then(|spec| spec.resources.as_ref());
    let resources = effective_resources(pod_level, container.resources.as_ref());
    if let Ok(resources) = serde_json::to_string(&resources) {
        put(RESOURCES, resources);
    }
    let hook = container.lifecycle.as_ref().and_then(|l| l.pre_stop.as_ref());
    if let Some(hook) = hook.and_then(|hook| serde_json::to_string(hook).ok()) {
        put("io.kubernetes.container.preStopHandler", hook);
    }
    if let Some(ports) = container.ports.as_ref().and_then(|ports| serde_json::to_string(ports).ok()) {
        put("io.kubernetes.container.ports", ports);
    }
    all
}

fn stop_signal(lifecycle: Option<&Lifecycle>) -> cri::Signal {
    lifecycle
        .and_then(|l| l.stop_signal.as_deref())
        .and_then(|name| cri::Signal::from_str_name(&format!("SIGNAL_{name}")))
        .unwrap_or(cri::Signal::RuntimeDefault)
}
