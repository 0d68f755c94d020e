//! Paths of the kubelet API. Pure.

use coracle_values::go;
use percent_encoding::percent_decode_str;

/// Resource of a request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Route {
    Healthz,
    Configz,
    Statusz,
    Flagz,
    Pods,
    RunningPods,
    Logs {
        namespace: String,
        pod: String,
        container: String,
    },
    /// A path below the directory of the node's logs.
    NodeLogs {
        path: String,
        /// Whether the path ends with a slash, which means a directory.
        is_directory: bool,
    },
    Exec(Target),
    Attach(Target),
    PortForward {
        namespace: String,
        pod: String,
    },
    Checkpoint(Target),
    StatsSummary,
    Metrics,
    MetricsResource,
    MetricsCadvisor,
    MetricsProbes,
    MetricsSlis,
}

/// A container by its pod's name. If `uid` is set, the pod must have it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Target {
    pub(super) namespace: String,
    pub(super) pod: String,
    pub(super) uid: Option<String>,
    pub(super) container: String,
}

impl Route {
    /// The first part of the path, for the metrics of requests.
    pub(super) fn label(&self) -> &'static str {
        match self {
            Self::Healthz => "healthz",
            Self::Configz => "configz",
            Self::Statusz => "statusz",
            Self::Flagz => "flagz",
            Self::Pods => "pods",
            Self::RunningPods => "runningpods",
            Self::Logs { .. } => "containerLogs",
            Self::NodeLogs { .. } => "logs",
            Self::Exec(_) => "exec",
            Self::Attach(_) => "attach",
            Self::PortForward { .. } => "portForward",
            Self::Checkpoint(_) => "checkpoint",
            Self::StatsSummary => "stats",
            Self::Metrics => "metrics",
            Self::MetricsResource => "metrics/resource",
            Self::MetricsCadvisor => "metrics/cadvisor",
            Self::MetricsProbes => "metrics/probes",
            Self::MetricsSlis => "metrics/slis",
        }
    }

    /// Whether the request is upgraded to a stream.
    pub(super) fn is_stream(&self) -> bool {
        matches!(self, Self::Exec(_) | Self::Attach(_) | Self::PortForward { .. })
    }

    /// Whether the response has all pods, their probes, or the usage of all pods and containers.
    pub(super) fn has_all_pods(&self) -> bool {
        let has_usage = matches!(self, Self::StatsSummary | Self::MetricsResource | Self::MetricsCadvisor);
        has_usage || matches!(self, Self::Pods | Self::RunningPods | Self::MetricsProbes)
    }

    /// Whether the response is the log of a container or of the node.
    pub(super) fn is_log(&self) -> bool {
        matches!(self, Self::Logs { .. } | Self::NodeLogs { .. })
    }

    /// Whether the response is 405 without `enableDebuggingHandlers`. Source: `InstallDebuggingDisabledHandlers` of
    /// upstream's `pkg/kubelet/server`.
    pub(super) fn is_for_debugging(&self) -> bool {
        self.is_stream() || self.is_log() || matches!(self, Self::RunningPods)
    }

    /// Whether the response is 404 without `enableDebuggingHandlers`.
    pub(super) fn is_absent_without_debugging(&self) -> bool {
        matches!(self, Self::Checkpoint(_) | Self::Configz | Self::Statusz | Self::Flagz)
    }

    /// Whether the resource has this method.
    pub(super) fn allows(&self, method: &http::Method) -> bool {
        let (get, post) = (*method == http::Method::GET, *method == http::Method::POST);
        match self {
            Self::Checkpoint(_) => post,
            Self::Exec(_) | Self::Attach(_) | Self::PortForward { .. } => get || post,
            _ => get,
        }
    }

    pub(super) fn of(path: &str) -> Option<Route> {
        let parts: Vec<&str> = path.trim_matches('/').split('/').collect();
        let own = |text: &str| percent_decode_str(text).decode_utf8_lossy().into_owned();
        let target = |namespace: &str, pod: &str, uid: Option<&str>, container: &str| Target {
            namespace: own(namespace),
            pod: own(pod),
            uid: uid.map(own),
            container: own(container),
        };
        if parts.iter().any(|part| part.is_empty()) {
            return None;
        }
        Some(match parts[..] {
            ["healthz"] | ["healthz", "log" | "ping" | "syncloop"] => Route::Healthz,
            ["configz"] => Route::Configz,
            ["statusz"] => Route::Statusz,
            ["flagz"] => Route::Flagz,
            ["pods"] => Route::Pods,
            ["runningpods"] => Route::RunningPods,
            ["containerLogs", namespace, pod, container] => {
                Route::Logs { namespace: own(namespace), pod: own(pod), container: own(container) }
            }
            ["logs", ref names @ ..] => {
                let names: Vec<String> = names.iter().map(|name| own(name)).collect();
                Route::NodeLogs { path: names.join("/"), is_directory: path.ends_with('/') }
            }
            ["exec", namespace, pod, container] => Route::Exec(target(namespace, pod, None, container)),
            ["exec", namespace, pod, uid, container] => {
                Route::Exec(target(namespace, pod, Some(uid), container))
            }
            ["attach", namespace, pod, container] => Route::Attach(target(namespace, pod, None, container)),
            ["attach", namespace, pod, uid, container] => {
                Route::Attach(target(namespace, pod, Some(uid), container))
            }
            ["portForward", namespace, pod] | ["portForward", namespace, pod, _] => {
                Route::PortForward { namespace: own(namespace), pod: own(pod) }
            }
            ["checkpoint", namespace, pod, container] => {
                Route::Checkpoint(target(namespace, pod, None, container))
            }
            ["stats"] | ["stats", "summary"] => Route::StatsSummary,
            ["metrics"] => Route::Metrics,
            ["metrics", "resource"] => Route::MetricsResource,
            ["metrics", "cadvisor"] => Route::MetricsCadvisor,
            ["metrics", "probes"] => Route::MetricsProbes,
            ["metrics", "slis"] => Route::MetricsSlis,
            _ => return None,
        })
    }
}

/// All values of a parameter, decoded, in their order.
pub(super) fn values<'a>(query: &'a str, names: &'a [&str]) -> impl Iterator<Item = String> + 'a {
    query.split('&').filter_map(move |pair| {
        let (name, value) = pair.split_once('=').unwrap_or((pair, ""));
        names.contains(&decode(name).as_str()).then(|| decode(value))
    })
}

/// Whether a flag is set, in the spellings that clients use.
pub(super) fn flag(query: &str, names: &[&str]) -> bool {
    values(query, names).any(|value| go::parse_bool(&value) == Some(true))
}

fn decode(text: &str) -> String {
    let mut bytes = Vec::with_capacity(text.len());
    let mut rest = text.as_bytes();
    while let Some((first, tail)) = rest.split_first() {
        let escaped = (*first == b'%')
            .then(|| tail.get(..2).and_then(|h| u8::from_str_radix(std::str::from_utf8(h).ok()?, 16).ok()))
            .flatten();
        bytes.push(match (escaped, *first) {
            (Some(byte), _) => byte,
            (None, b'+') => b' ',
            (None, byte) => byte,
        });
        rest = if escaped.is_some() { &tail[2..] } else { tail };
    }
    String::from_utf8_lossy(&bytes).into_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paths_are_those_of_the_kubelet() {
        let logs = Route::Logs { namespace: "ns".to_owned(), pod: "p".to_owned(), container: "c".to_owned() };
        assert_eq!(Route::of("/containerLogs/ns/p/c"), Some(logs.clone()));
        assert_eq!(Route::of("/containerLogs/n%73/p/c"), Some(logs));
        let node_logs =
            |path: &str, is_directory| Some(Route::NodeLogs { path: path.to_owned(), is_directory });
        assert_eq!(Route::of("/logs/"), node_logs("", true));
        assert_eq!(Route::of("/logs"), node_logs("", false));
        assert_eq!(Route::of("/logs/pods/a%20b.log"), node_logs("pods/a b.log", false));
        assert_eq!(Route::of("/logs/pods/"), node_logs("pods", true));
        let target = |uid: Option<&str>| Target {
            namespace: "ns".to_owned(),
            pod: "p".to_owned(),
            uid: uid.map(str::to_owned),
            container: "c".to_owned(),
        };
        assert_eq!(Route::of("/exec/ns/p/c"), Some(Route::Exec(target(None))));
        assert_eq!(Route::of("/attach/ns/p/u/c"), Some(Route::Attach(target(Some("u")))));
        assert_eq!(Route::of("/checkpoint/ns/p/c"), Some(Route::Checkpoint(target(None))));
        assert_eq!(Route::of("/pods/"), Some(Route::Pods));
        assert_eq!(Route::of("/runningpods/"), Some(Route::RunningPods));
        let labels = ["/exec/ns/p/c", "/metrics/cadvisor", "/healthz/ping"]
            .map(|path| Route::of(path).unwrap().label());
        assert_eq!(labels, ["exec", "metrics/cadvisor", "healthz"]);
        assert!(Route::of("/portForward/ns/p").unwrap().is_stream() && !Route::Metrics.is_stream());
        for nowhere in ["/", "/containerLogs/ns/p", "/exec//p/c", "/unknown", "/containerLogs/a/b/c/d"] {
            assert_eq!(Route::of(nowhere), None, "{nowhere}");
        }
    }

    #[test]
    fn each_resource_has_its_methods() {
        let methods = [http::Method::GET, http::Method::POST, http::Method::PUT];
        let allowed = |path: &str| {
            let route = Route::of(path).unwrap();
            methods.each_ref().map(|method| route.allows(method))
        };
        assert_eq!(allowed("/pods"), [true, false, false]);
        assert_eq!(allowed("/exec/ns/p/c"), [true, true, false]);
        assert_eq!(allowed("/checkpoint/ns/p/c"), [false, true, false]);
    }

    #[test]
    fn parameters_are_decoded() {
        let query = "command=sh&command=-c&command=echo%20a%2Bb+c&input=1&tty=false&bad=%zz";
        assert_eq!(values(query, &["command"]).collect::<Vec<_>>(), ["sh", "-c", "echo a+b c"]);
        assert!(flag(query, &["stdin", "input"]) && !flag(query, &["tty"]) && !flag(query, &["error"]));
        assert_eq!(values(query, &["bad"]).next().as_deref(), Some("%zz"));
    }
}
