//! The runtime's side of the CNI specification: runs the plugins of a list in order, and keeps the results. Our own
//! types run in process, other types as executables.

use serde_json::{Map, Value};
use tracing::debug;

use crate::error::Error;
use crate::host::Host;
use crate::plugin;
use crate::plugin_executables::Executables;
use crate::plugin_kind::Kind;
use crate::spec::list::{Capabilities, List};
use crate::spec::request::{Request, Valid};
use crate::spec::result::Answer;
use crate::spec::{Command, Version};

pub(crate) use crate::parameters::Parameters;

/// "Try again later" (section 5, "Error"). Our own executables return it for a full range, too.
const TRY_AGAIN: u32 = 11;

/// The plugins that a GC selects.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum ExecutionPlace {
    /// Plugins that run in this process, with their IPAM plugin.
    InProcess,
    /// Plugins that run as an executable, and plugins whose IPAM plugin runs as an executable.
    Executable,
}

/// Parameters of one call of a plugin.
pub(crate) struct Call<'a> {
    pub(crate) at: &'a Parameters,
    /// Result of the previous plugin, or of the whole ADD.
    pub(crate) previous: Option<Value>,
}

/// Runs the plugins of lists.
pub(crate) struct Invoker<'a> {
    pub(crate) host: &'a Host,
    pub(crate) executables: &'a Executables,
}

// === impl Invoker ===

impl Invoker<'_> {
    /// Runs ADD of each plugin in order, each with the result of the previous plugin. After a failure, the caller has
    /// to call [`del`](Self::del).
    pub(crate) async fn add(&self, list: &List, at: &Parameters) -> Result<Answer, Error> {
        let mut previous: Option<Answer> = None;
        for plugin in &list.plugins {
            let result = previous.as_ref().map(|answer| answer.to_value(list.version));
            let request = self.request(Command::Add, list, plugin, Call { at, previous: result });
            previous = self.run(&request).await?.or(previous);
        }
        Ok(previous.unwrap_or_default())
    }

    /// Runs DEL of each plugin in reverse order, with the result of ADD if there is one.
    pub(crate) async fn del(
        &self,
        list: &List,
        at: &Parameters,
        result: Option<&Answer>,
    ) -> Result<(), Error> {
        let result = result.filter(|_| list.version.has_check()).map(|answer| answer.to_value(list.version));
        for plugin in list.plugins.iter().rev() {
            let request = self.request(Command::Del, list, plugin, Call { at, previous: result.clone() });
            self.run(&request).await?;
        }
        Ok(())
    }

    /// Runs CHECK of each plugin.
    pub(crate) async fn check(&self, list: &List, at: &Parameters, result: &Answer) -> Result<(), Error> {
        if list.disable_check || !list.version.has_check() {
            return Ok(());
        }
        let result = result.to_value(list.version);
        for plugin in &list.plugins {
            self.run(&self.request(
                Command::Check,
                list,
                plugin,
                Call { at, previous: Some(result.clone()) },
            ))
            .await?;
        }
        Ok(())
    }

    /// Runs STATUS of each plugin. Lists before version 1.1.0 have no STATUS: for them, only the existence of the
    /// executables is checked. A full range is not a failure: existing pods work, and ADD reports the full range.
    pub(crate) async fn status(&self, list: &List) -> Result<(), Error> {
        for plugin in &list.plugins {
            let has_status = list.version.has_status_and_gc() || Kind::parse(kind(plugin)).is_some();
            if has_status {
                match self.run(&self.request_without_attachment(Command::Status, list, plugin)).await {
                    Err(Error::RangeFull { .. } | Error::Plugin { code: TRY_AGAIN, .. }) | Ok(_) => {}
                    Err(error) => return Err(error),
                }
            } else {
                self.executables.find(kind(plugin))?;
            }
        }
        Ok(())
    }

    /// Runs GC of the plugins that run in process, or of the plugins that run as executables. Our own plugins support
    /// GC in all versions. Runs all plugins, and returns the first error. Runs no plugin if the list has `disableGC`,
    /// which means that other runtimes use the network, too.
    pub(crate) async fn gc(&self, list: &List, valid: &[Valid], of: ExecutionPlace) -> Result<(), Error> {
        let mut first = Ok(());
        let is_selected =
            |plugin: &&Map<String, Value>| runs_in_process(plugin) == (of == ExecutionPlace::InProcess);
        let selected = list.plugins.iter().filter(is_selected).filter(|_| !list.disable_gc);
        for plugin in selected {
            if list.version.has_status_and_gc() || Kind::parse(kind(plugin)).is_some() {
                let mut request = self.request_without_attachment(Command::Gc, list, plugin);
                request.set_valid_attachments(valid);
                first = first.and(self.run(&request).await.map(drop));
            }
        }
        first
    }

    /// The request for one plugin of the list.
    pub(crate) fn request(
        &self,
        command: Command,
        list: &List,
        plugin: &Map<String, Value>,
        call: Call<'_>,
    ) -> Request {
        Request {
            command,
            container_id: call.at.container_id.clone(),
            netns: call.at.netns.clone(),
            ifname: call.at.ifname.clone(),
            args: call.at.args.clone(),
            path: self.executables.path.clone(),
            conf: list.derive(plugin, &call.at.capabilities, call.previous),
        }
    }

    /// A request that concerns no attachment.
    fn request_without_attachment(
        &self,
        command: Command,
        list: &List,
        plugin: &Map<String, Value>,
    ) -> Request {
        let none = Parameters {
            container_id: String::new(),
            netns: None,
            ifname: String::new(),
            args: String::new(),
            capabilities: Capabilities::new(),
        };
        self.request(command, list, plugin, Call { at: &none, previous: None })
    }

    async fn run(&self, request: &Request) -> Result<Option<Answer>, Error> {
        debug!(
            plugin = request.kind(),
            command = request.command.name(),
            id = request.container_id,
            "calling a CNI plugin"
        );
        run(self.host, self.executables, request.kind(), request).await
    }
}

/// Whether the plugin and its IPAM plugin are our own.
fn runs_in_process(plugin: &Map<String, Value>) -> bool {
    let own = |kind: &Value| kind.as_str().is_some_and(|kind| kind.is_empty() || Kind::parse(kind).is_some());
    let addresses = plugin.get("ipam").and_then(|ipam| ipam.get("type"));
    own(&kind(plugin).into()) && addresses.is_none_or(own)
}

fn kind(plugin: &Map<String, Value>) -> &str {
    plugin.get("type").and_then(Value::as_str).unwrap_or_default()
}

/// Runs one plugin of this type with this request.
async fn run(
    host: &Host,
    executables: &Executables,
    kind: &str,
    request: &Request,
) -> Result<Option<Answer>, Error> {
    match Kind::parse(kind).filter(|_| is_in_process(host, executables, kind)) {
        Some(own) => plugin::run(host, executables, own, request).await,
        None => executables.run(kind, request).await,
    }
}

/// Whether a plugin of this type runs in process. This is also the case if the executable of the plugin is this
/// program: an execution would have the same result, but would take some milliseconds more.
fn is_in_process(host: &Host, executables: &Executables, kind: &str) -> bool {
    Kind::parse(kind).is_some() && (host.in_process() || executables.is_this_program(kind))
}

/// The answer of our plugins to VERSION.
pub(crate) fn supported() -> Value {
    serde_json::json!({"cniVersion": Version::NEWEST.name(), "supportedVersions": Version::ALL.map(Version::name)})
}
