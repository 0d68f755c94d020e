//! One invocation of a plugin: its environment and its derived configuration.

use std::path::PathBuf;

use serde::de::DeserializeOwned;
use serde_json::{Map, Value};

use super::result::Answer;
use super::{Command, Version};
use crate::error::Error;

/// Keys with a meaning in the protocol or in all of our plugins.
const OF_PROTOCOL: [&str; 12] = [
    "cniVersion",
    "cniVersions",
    "name",
    "type",
    "args",
    "runtimeConfig",
    "prevResult",
    "capabilities",
    "disableCheck",
    "disableGC",
    "loadOnlyInlinedPlugins",
    "coracle",
];
const VALID_ATTACHMENTS: &str = "cni.dev/valid-attachments";
/// Another name of the key of the valid attachments. The specification and libcni used different names, and libcni
/// writes both.
const ATTACHMENTS: &str = "cni.dev/attachments";

/// The request to a plugin.
#[derive(Debug, Clone)]
pub(crate) struct Request {
    pub(crate) command: Command,
    pub(crate) container_id: String,
    pub(crate) netns: Option<PathBuf>,
    pub(crate) ifname: String,
    /// `CNI_ARGS`, unparsed.
    pub(crate) args: String,
    /// `CNI_PATH`, in order.
    pub(crate) path: Vec<PathBuf>,
    /// The derived configuration.
    pub(crate) conf: Map<String, Value>,
}

/// A valid attachment in a GC request.
#[derive(Debug, Clone, PartialEq, Eq, Hash, serde::Serialize, serde::Deserialize)]
pub(crate) struct Valid {
    #[serde(rename = "containerID")]
    pub(crate) container_id: String,
    pub(crate) ifname: String,
}

// === impl Request ===

impl Request {
    /// Type of the plugin.
    pub(crate) fn kind(&self) -> &str {
        self.text("type")
    }

    /// The network's name.
    pub(crate) fn network(&self) -> &str {
        self.text("name")
    }

    fn text(&self, key: &str) -> &str {
        self.conf.get(key).and_then(Value::as_str).unwrap_or_default()
    }

    /// Version of the protocol. An unknown version is an error. A missing version means 0.1.0, which is unknown, too.
    pub(crate) fn version(&self) -> Result<Version, Error> {
        let text = self.conf.get("cniVersion").and_then(Value::as_str).unwrap_or("0.1.0");
        Version::parse(text).ok_or_else(|| Error::IncompatibleVersion { version: text.to_owned() })
    }

    /// Result of the previous plugins, or of the whole ADD.
    pub(crate) fn previous(&self) -> Result<Option<Answer>, Error> {
        let Some(value) = self.conf.get("prevResult").filter(|value| !value.is_null()) else {
            return Ok(None);
        };
        Answer::parse(value.clone(), self.version()?).map(Some)
    }

    /// Like [`previous`](Self::previous), for a plugin that must follow another plugin.
    pub(crate) fn chained(&self) -> Result<Answer, Error> {
        let reason = "is missing: this plugin must follow another plugin in the list";
        self.previous()?.ok_or_else(|| Error::invalid("prevResult", reason))
    }

    /// The plugin's own keys as `T`. `T` must deny unknown fields, so that the error names an unknown field.
    pub(crate) fn own<T: DeserializeOwned>(&self) -> Result<T, Error> {
        let own = |key: &String| !OF_PROTOCOL.contains(&key.as_str()) && !key.starts_with("cni.dev/");
        let map = self.conf.iter().filter(|(key, _)| own(key));
        let map: Map<String, Value> = map.map(|(key, value)| (key.clone(), value.clone())).collect();
        from_value(map.into(), "")
    }

    /// The runtime's value of a capability. `None` if the runtime sets no value.
    pub(crate) fn capability<T: DeserializeOwned>(&self, name: &str) -> Result<Option<T>, Error> {
        let value = self.conf.get("runtimeConfig").and_then(|config| config.get(name));
        let Some(value) = value.filter(|value| !value.is_null()) else { return Ok(None) };
        from_value(uncapitalized(value.clone()), &format!("runtimeConfig.{name}")).map(Some)
    }

    /// A member of `args.cni`.
    pub(crate) fn conf_arg<T: DeserializeOwned>(&self, name: &str) -> Result<Option<T>, Error> {
        let value = self.conf.get("args").and_then(|args| args.get("cni")).and_then(|args| args.get(name));
        let Some(value) = value.filter(|value| !value.is_null()) else { return Ok(None) };
        from_value(value.clone(), &format!("args.cni.{name}")).map(Some)
    }

    /// A key of `CNI_ARGS`, in any case.
    pub(crate) fn env_arg(&self, name: &str) -> Option<&str> {
        let pairs = self.args.split(';').filter_map(|pair| pair.split_once('='));
        pairs.filter(|(key, _)| key.eq_ignore_ascii_case(name)).map(|(_, value)| value).next()
    }

    /// The attachments that GC keeps.
    pub(crate) fn valid_attachments(&self) -> Result<Vec<Valid>, Error> {
        let reason = "must list the attachments that are valid";
        let named = [VALID_ATTACHMENTS, ATTACHMENTS].into_iter().find_map(|name| self.conf.get(name));
        let value = named.ok_or_else(|| Error::invalid(VALID_ATTACHMENTS, reason))?;
        // Go's encoders write null for an empty list.
        if value.is_null() { Ok(Vec::new()) } else { from_value(value.clone(), VALID_ATTACHMENTS) }
    }

    /// Adds the valid attachments for GC.
    pub(crate) fn set_valid_attachments(&mut self, valid: &[Valid]) {
        for name in [VALID_ATTACHMENTS, ATTACHMENTS] {
            self.conf.insert(name.to_owned(), serde_json::json!(valid));
        }
    }

    /// The namespace, for a command that needs it.
    pub(crate) fn netns(&self) -> Result<&PathBuf, Error> {
        let missing = Error::Environment { variable: "CNI_NETNS", reason: "is missing".to_owned() };
        self.netns.as_ref().ok_or(missing)
    }

    /// Refuses unknown keys of `CNI_ARGS`, unless `IgnoreUnknown` is set.
    pub(crate) fn check_args(&self) -> Result<(), Error> {
        let wrong = |reason: String| Error::Environment { variable: "CNI_ARGS", reason };
        let ignore =
            self.env_arg("IgnoreUnknown").is_some_and(|v| matches!(v, "1" | "true" | "True" | "TRUE"));
        for pair in self.args.split(';').filter(|pair| !pair.is_empty()) {
            let (key, _) = pair
                .split_once('=')
                .ok_or_else(|| wrong(format!("{pair:?} is not of the form KEY=VALUE")))?;
            let known = ["ignoreunknown", "mac", "ip"].contains(&key.to_ascii_lowercase().as_str());
            if !known && !ignore {
                return Err(wrong(format!("the key {key} is not known, and IgnoreUnknown is not set")));
            }
        }
        Ok(())
    }
}

/// Keys of a capability in the spelling of its convention. containerd capitalizes them (`HostPort`), which Go programs
/// accept.
fn uncapitalized(value: Value) -> Value {
    match value {
        Value::Array(values) => values.into_iter().map(uncapitalized).collect(),
        Value::Object(map) => {
            let small = |key: String| match key.chars().next() {
                Some(first) => first.to_ascii_lowercase().to_string() + &key[first.len_utf8()..],
                None => key,
            };
            map.into_iter().map(|(key, value)| (small(key), uncapitalized(value))).collect()
        }
        other => other,
    }
}

/// A value as `T`, or an error with the field. An unknown field is unsupported. Any other error makes the field
/// invalid.
pub(crate) fn from_value<T: DeserializeOwned>(value: Value, at: &str) -> Result<T, Error> {
    T::deserialize(&value).map_err(|error| {
        let reason = error.to_string();
        match reason.strip_prefix("unknown field `").and_then(|rest| rest.split_once('`')) {
            Some((field, _)) => {
                let path = if at.is_empty() { field.to_owned() } else { format!("{at}.{field}") };
                Error::unsupported(&path, member(&value, field).unwrap_or(&Value::Null))
            }
            None => Error::invalid(if at.is_empty() { "the configuration" } else { at }, reason),
        }
    })
}

/// The first member with this name at any depth.
fn member<'v>(value: &'v Value, name: &str) -> Option<&'v Value> {
    match value {
        Value::Object(map) => map.get(name).or_else(|| map.values().find_map(|value| member(value, name))),
        Value::Array(values) => values.iter().find_map(|value| member(value, name)),
        _ => None,
    }
}

#[cfg(test)]
impl Request {
    /// An ADD of `eth0` to the container `c`. The configuration must be an object.
    pub(crate) fn for_test(conf: &Value, args: &str) -> Self {
        Self {
            command: Command::Add,
            container_id: "c".into(),
            netns: None,
            ifname: "eth0".into(),
            args: args.into(),
            path: Vec::new(),
            conf: conf.as_object().cloned().unwrap_or_default(),
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn request(conf: Value, args: &str) -> Request {
        Request::for_test(&conf, args)
    }

    #[derive(Debug, serde::Deserialize)]
    #[serde(deny_unknown_fields)]
    struct Own {
        size: u32,
    }

    #[test]
    fn own_keys_are_read_and_unknown_keys_refused_by_name() {
        let good = json!({"cniVersion": "1.0.0", "name": "n", "type": "t", "cni.dev/x": 1, "size": 3});
        assert_eq!(request(good, "").own::<Own>().unwrap().size, 3);
        let error = request(json!({"size": 3, "colour": 1}), "").own::<Own>().unwrap_err();
        assert_eq!((error.code(), error.to_string().contains("colour")), (2, true));
        // The error contains key and value, as the specification requires.
        let error = request(json!({"size": 3, "colour": {"deep": "red"}}), "").own::<Own>().unwrap_err();
        assert!(error.to_string().contains(r#"{"deep":"red"}"#), "{error}");
        assert_eq!(request(json!({"size": "x"}), "").own::<Own>().unwrap_err().code(), 7);
    }

    #[test]
    fn capabilities_are_read_as_containerd_writes_them() {
        let filtered = json!({"runtimeConfig": {"portMappings": [
            {"HostPort": 8080, "ContainerPort": 80, "Protocol": "tcp", "HostIP": ""},
            {"hostPort": 8081, "containerPort": 81, "protocol": "udp"}]}});
        let ports: Vec<crate::ports::PortMapping> =
            request(filtered, "").capability("portMappings").unwrap().unwrap();
        assert_eq!(ports.iter().map(|port| port.host_port).collect::<Vec<_>>(), [8080, 8081]);
        let wrong = json!({"runtimeConfig": {"bandwidth": {"Colour": 1}}});
        let error = request(wrong, "").capability::<Own>("bandwidth").unwrap_err();
        assert_eq!((error.code(), error.to_string().contains("bandwidth.colour")), (2, true), "{error}");
    }

    #[test]
    fn unknown_arguments_are_refused_unless_they_may_be_ignored() {
        assert!(request(json!({}), "IgnoreUnknown=1;K8S_POD_NAME=a;IP=10.0.0.1").check_args().is_ok());
        assert!(request(json!({}), "K8S_POD_NAME=a").check_args().is_err());
        assert!(request(json!({}), "novalue").check_args().is_err());
        assert_eq!(request(json!({}), "a=b;ip=10.0.0.1").env_arg("IP"), Some("10.0.0.1"));
    }

    #[test]
    fn a_previous_result_and_the_valid_attachments_are_read() {
        let conf = json!({"cniVersion": "0.4.0", "prevResult": {"ips": [{"version": "4", "address": "10.0.0.2/8"}]},
            "cni.dev/valid-attachments": [{"containerID": "c", "ifname": "eth0"}]});
        let request = request(conf, "");
        assert_eq!(request.chained().unwrap().ips.len(), 1);
        assert_eq!(request.valid_attachments().unwrap()[0].container_id, "c");
        let mut filtered = request;
        filtered.set_valid_attachments(&[]);
        assert_eq!(
            ["cni.dev/valid-attachments", "cni.dev/attachments"].map(|name| &filtered.conf[name]),
            [&json!([]); 2]
        );
        filtered.conf.remove("cni.dev/valid-attachments");
        assert_eq!(filtered.valid_attachments().unwrap(), []);
    }
}
