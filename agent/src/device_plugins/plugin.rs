//! Calls of a device plugin, over a gRPC connection to its socket.
//!
//! Answers have limits on size and time, and are refused as a whole if a part is invalid.

use std::collections::BTreeMap;
use std::future::Future;
use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

use coracle_events::{MESSAGE_MAX, printable};
use coracle_proto::device_plugin as api;
use coracle_proto::device_plugin::device_plugin_client::DevicePluginClient;
use futures::{FutureExt, Stream, StreamExt};
use http::uri::PathAndQuery;
use tokio_util::sync::CancellationToken;
use tonic::client::Grpc;
use tonic::{Code, Request, Status, Streaming};

use super::edits::Edits;
use super::list_codec::{DEVICES_MAX, ListCodec, NODES_MAX};
use super::table::Device;
use crate::dra::{Caller, Link, Version, open_socket, origin};

/// Timeout of the connection and of the first calls.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);
/// Timeout of Allocate. Upstream has no timeout; a pod waits for the answer.
const ALLOCATE_TIMEOUT: Duration = Duration::from_secs(60);
/// Timeout of PreStartContainer, as in the kubelet (`KubeletPreStartContainerRPCTimeoutInSecs`).
const PRE_START_TIMEOUT: Duration = Duration::from_secs(30);
/// Maximum bytes of an answer: the default of Go's gRPC library.
const ANSWER_MAX: usize = 4 << 20;
/// Maximum bytes of an answer to Allocate. The node keeps it in memory and in the record of the pod.
const ALLOCATED_MAX: usize = 256 << 10;
/// Maximum lists that are read at once: a plugin can send without end.
const LISTS_MAX: usize = 4096;
/// Maximum bytes of a device's id. The API says 63 characters, which upstream does not check.
const ID_MAX: usize = 256;

/// The reason why a call of a plugin failed.
#[derive(Debug, thiserror::Error)]
pub(super) enum PluginError {
    #[error("cannot connect to the socket {path}")]
    Connect {
        path: PathBuf,
        #[source]
        source: io::Error,
    },
    #[error("{call}: the plugin did not answer in time")]
    Late { call: &'static str },
    /// The text has the form of Go's gRPC library, as in the kubelet's messages.
    #[error("rpc error: code = {code:?} desc = {message}")]
    Rpc { code: Code, message: String },
    #[error("the plugin has ended")]
    Ended,
    #[error("{call}: {problem}")]
    Invalid { call: &'static str, problem: &'static str },
}

/// A connected plugin. Cheap to clone.
#[derive(Clone, Debug)]
pub(super) struct Plugin {
    caller: Caller,
    /// Cancelled when the plugin has ended the list of its devices. Its socket may still answer.
    ended: CancellationToken,
    /// Whether PreStartContainer must be called before each start of a container.
    pub(super) needs_pre_start: bool,
    /// Whether the plugin can choose its preferred devices among the available devices.
    pub(super) has_preferences: bool,
}

/// Connects to the socket of a plugin in the directory. The plugin is disconnected when the link is dropped.
pub(super) async fn connect(dir: &Path, endpoint: &Path) -> Result<Link, PluginError> {
    let path = dir.join(endpoint);
    let failed = |source| PluginError::Connect { path: path.clone(), source };
    let socket = open_socket(dir, endpoint).map_err(failed)?;
    match tokio::time::timeout(CONNECT_TIMEOUT, Link::open(&socket)).await {
        Ok(link) => link.map_err(failed),
        Err(_elapsed) => Err(failed(io::ErrorKind::TimedOut.into())),
    }
}

// === impl Plugin ===

impl Plugin {
    /// Asks a connected plugin for its options.
    pub(super) async fn open(link: &Link) -> Result<Self, PluginError> {
        const CALL: &str = "GetDevicePluginOptions";
        let (caller, ended) = (link.caller(Version::V1), CancellationToken::new());
        let plugin = Self { caller, ended, needs_pre_start: false, has_preferences: false };
        let mut client = plugin.client();
        let options = within(CALL, CONNECT_TIMEOUT, client.get_device_plugin_options(api::Empty {})).await?;
        let (needs_pre_start, has_preferences) =
            (options.pre_start_required, options.get_preferred_allocation_available);
        Ok(Self { needs_pre_start, has_preferences, ..plugin })
    }

    /// Ends the connection. Later calls of [`Self::pre_start`] fail.
    pub(super) fn end(&self, link: Link) {
        self.ended.cancel();
        drop(link);
    }

    /// Begins the stream of device lists.
    pub(super) async fn watch(&self) -> Result<Streaming<api::ListAndWatchResponse>, PluginError> {
        let failed = |error: hyper::Error| rpc(&Status::unknown(error.to_string()));
        let client = Grpc::with_origin(self.caller.clone(), origin());
        let mut client = client.max_decoding_message_size(ANSWER_MAX);
        client.ready().await.map_err(failed)?;
        let path = PathAndQuery::from_static("/v1beta1.DevicePlugin/ListAndWatch");
        // The call has no timeout, because some servers send the response only with the first list, which may be late.
        let begun = client.server_streaming(Request::new(api::Empty {}), path, ListCodec).await;
        begun.map(tonic::Response::into_inner).map_err(|status| rpc(&status))
    }

    /// The devices that the plugin prefers among the available devices.
    pub(super) async fn preferred(
        &self,
        available: Vec<String>,
        included: Vec<String>,
        count: usize,
    ) -> Result<Vec<String>, PluginError> {
        let request = api::ContainerPreferredAllocationRequest {
            available_device_ids: available,
            must_include_device_ids: included,
            allocation_size: i32::try_from(count).unwrap_or(i32::MAX),
        };
        let request = api::PreferredAllocationRequest { container_requests: vec![request] };
        let mut client = self.client();
        let answer = client.get_preferred_allocation(request);
        let answer = within("GetPreferredAllocation", CONNECT_TIMEOUT, answer).await?;
        Ok(answer.container_responses.into_iter().next().map(|first| first.device_ids).unwrap_or_default())
    }

    /// Allocates devices. Returns the changes of the container's configuration.
    pub(super) async fn allocate(&self, ids: Vec<String>) -> Result<Edits, PluginError> {
        const CALL: &str = "Allocate";
        let request = api::ContainerAllocateRequest { device_ids: ids };
        let request = api::AllocateRequest { container_requests: vec![request] };
        let mut client = self.client().max_decoding_message_size(ALLOCATED_MAX);
        let answer = within(CALL, ALLOCATE_TIMEOUT, client.allocate(request)).await?;
        let invalid = |problem| PluginError::Invalid { call: CALL, problem };
        let first = answer.container_responses.into_iter().next();
        let first = first.ok_or_else(|| invalid("no containers return in allocation response"))?;
        Edits::of(first).map_err(invalid)
    }

    /// Prepares devices for the start of a container that has them.
    pub(super) async fn pre_start(&self, ids: Vec<String>) -> Result<(), PluginError> {
        if self.ended.is_cancelled() {
            return Err(PluginError::Ended);
        }
        let request = api::PreStartContainerRequest { device_ids: ids };
        let mut client = self.client();
        let answer = client.pre_start_container(request);
        within("PreStartContainer", PRE_START_TIMEOUT, answer).await.map(drop)
    }

    fn client(&self) -> DevicePluginClient<Caller> {
        DevicePluginClient::with_origin(self.caller.clone(), origin()).max_decoding_message_size(ANSWER_MAX)
    }
}

/// Waits for a list of a plugin. If several lists have arrived, returns the last one, because each list has all
/// devices. None if the plugin has ended the stream.
pub(super) async fn newest<T>(
    lists: &mut (impl Stream<Item = Result<T, Status>> + Unpin),
) -> Result<Option<T>, PluginError> {
    let failed = |status: Status| rpc(&status);
    let mut newest = lists.next().await.transpose().map_err(failed)?;
    for _ in 0..LISTS_MAX {
        if newest.is_none() {
            break;
        }
        // Cancel-safe: the stream keeps an incomplete list.
        let Some(next) = lists.next().now_or_never() else { break };
        newest = next.transpose().map_err(failed)?;
    }
    Ok(newest)
}

/// The devices in a list of a plugin.
///
/// # Errors
/// When a part is invalid or too large.
pub(super) fn parse_devices(
    list: api::ListAndWatchResponse,
) -> Result<BTreeMap<String, Device>, PluginError> {
    let invalid = |problem| PluginError::Invalid { call: "ListAndWatch", problem };
    if list.devices.len() > DEVICES_MAX {
        return Err(invalid("too many devices"));
    }
    let one = |device: api::Device| {
        if device.id.is_empty() || device.id.len() > ID_MAX || device.id.contains(char::is_control) {
            return Err(invalid("the id of a device is empty, too long or has control characters"));
        }
        let nodes: Vec<i64> =
            device.topology.into_iter().flat_map(|topology| topology.nodes).map(|node| node.id).collect();
        if nodes.len() > NODES_MAX {
            return Err(invalid("a device has too many NUMA nodes"));
        }
        Ok((device.id, Device { is_healthy: device.health == "Healthy", nodes }))
    };
    list.devices.into_iter().map(one).collect()
}

/// The error when the devices of all plugins exceed the limit of the node.
pub(super) fn too_many() -> PluginError {
    PluginError::Invalid { call: "ListAndWatch", problem: "the plugins of the node have too many devices" }
}

/// The error of a stream or call.
fn rpc(status: &Status) -> PluginError {
    PluginError::Rpc { code: status.code(), message: printable(status.message(), MESSAGE_MAX / 4) }
}

/// The answer to a call. An error if it takes longer than the limit.
async fn within<T>(
    call: &'static str,
    limit: Duration,
    answer: impl Future<Output = Result<tonic::Response<T>, Status>>,
) -> Result<T, PluginError> {
    match tokio::time::timeout(limit, answer).await {
        Ok(answer) => answer.map(tonic::Response::into_inner).map_err(|status| rpc(&status)),
        Err(_elapsed) => Err(PluginError::Late { call }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn list(ids: &[&str]) -> api::ListAndWatchResponse {
        let device = |id: &&str| {
            let health = if *id == "ill" { "Unhealthy" } else { "Healthy" };
            let topology = Some(api::TopologyInfo { nodes: vec![api::NumaNode { id: 1 }] });
            api::Device { id: (*id).to_owned(), health: health.to_owned(), topology }
        };
        api::ListAndWatchResponse { devices: ids.iter().map(device).collect() }
    }

    #[test]
    fn lists_of_devices_are_limited_and_have_printable_ids() {
        let found = parse_devices(list(&["a", "ill"])).unwrap();
        assert!(found["a"].is_healthy && !found["ill"].is_healthy && found["a"].nodes == [1]);
        for bad in ["", "a\nb", &"x".repeat(ID_MAX + 1)] {
            assert!(parse_devices(list(&[bad])).is_err(), "{bad:?}");
        }
        assert!(parse_devices(list(&["a"].repeat(DEVICES_MAX + 1))).is_err());
        let mut nodes = list(&["a"]);
        nodes.devices[0].topology =
            Some(api::TopologyInfo { nodes: vec![api::NumaNode { id: 1 }; NODES_MAX + 1] });
        assert!(parse_devices(nodes).is_err());
    }

    #[tokio::test]
    async fn the_last_of_the_lists_that_have_arrived_counts() {
        use futures::stream::{empty, iter, pending};

        let mut lists = iter([Ok(1), Ok(2), Ok(3)]).chain(pending());
        assert_eq!(newest(&mut lists).await.unwrap(), Some(3));
        let mut ended = iter([Ok(1)]).chain(empty());
        assert_eq!(newest(&mut ended).await.unwrap(), None);
        let mut failed = iter([Ok(1), Err(Status::unknown("broken"))]).chain(pending());
        assert!(newest(&mut failed).await.is_err());
        let mut endless = futures::stream::repeat_with(|| Ok(1));
        assert_eq!(newest(&mut endless).await.unwrap(), Some(1));
    }
}
