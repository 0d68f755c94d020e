//! A runtime's side of the specification: running a list's plugins in order, our own types in process and
//! all others as executables, freely mixed, and keeping what each attachment was given.

pub(crate) mod cache;
mod exec;

use std::path::PathBuf;
use std::time::Duration;

use serde_json::{Map, Value};
use tracing::debug;

use crate::error::Error;
use crate::host::Host;
use crate::plugin;
use crate::spec::list::{Capabilities, List};
use crate::spec::request::{Request, Valid};
use crate::spec::result::Answer;
use crate::spec::{Command, Version};

/// "Try again later" (section 5, "Error"): what our own executables say of a full range, too.
const TRY_AGAIN: u32 = 11;

/// Where foreign plugins are, and how long one may take.
#[derive(Debug, Clone)]
pub(crate) struct Executables {
    pub(crate) path: Vec<PathBuf>,
    pub(crate) timeout: Duration,
    /// Whether each is killed with all that it runs, as what a runtime runs is. What a plugin runs goes with the plugin.
    pub(crate) lead: bool,
}

/// One attachment's parameters: all that ADD, DEL and CHECK must be given alike.
#[derive(Debug, Clone)]
pub(crate) struct Parameters {
    pub(crate) container_id: String,
    pub(crate) netns: Option<PathBuf>,
    pub(crate) ifname: String,
    /// `CNI_ARGS`.
    pub(crate) args: String,
    pub(crate) capabilities: Capabilities,
}

/// Where a plugin runs, with the one that gives addresses to it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Where {
    InProcess,
    Elsewhere,
}

/// Runs lists.
pub(crate) struct Invoker<'a> {
    pub(crate) host: &'a Host,
    pub(crate) executables: &'a Executables,
}

// === impl Invoker ===

impl Invoker<'_> {
    /// Runs every plugin in order, each with the result of the one before. Nothing is undone here: the caller
    /// calls [`del`](Self::del) after a failure, too.
    pub(crate) async fn add(&self, list: &List, at: &Parameters) -> Result<Answer, Error> {
        let mut previous: Option<Answer> = None;
        for plugin in &list.plugins {
            let result = previous.as_ref().map(|answer| answer.to_value(list.version));
            let request = self.request(Command::Add, list, plugin, (at, result));
            previous = self.run(&request).await?.or(previous);
        }
        Ok(previous.unwrap_or_default())
    }

    /// Runs every plugin in reverse order, with the result of the ADD when there was one.
    pub(crate) async fn del(
        &self,
        list: &List,
        at: &Parameters,
        result: Option<&Answer>,
    ) -> Result<(), Error> {
        let result = result.filter(|_| list.version.has_check()).map(|answer| answer.to_value(list.version));
        for plugin in list.plugins.iter().rev() {
            let request = self.request(Command::Del, list, plugin, (at, result.clone()));
            self.run(&request).await?;
        }
        Ok(())
    }

    /// Asks every plugin whether all is as ADD left it.
    pub(crate) async fn check(&self, list: &List, at: &Parameters, result: &Answer) -> Result<(), Error> {
        if list.disable_check || !list.version.has_check() {
            return Ok(());
        }
        let result = result.to_value(list.version);
        for plugin in &list.plugins {
            self.run(&self.request(Command::Check, list, plugin, (at, Some(result.clone())))).await?;
        }
        Ok(())
    }

    /// Asks every plugin whether it could serve an ADD; those of lists before 1.1.0 cannot be asked. That no address is
    /// free is no reason why not: the pods that have them are well, and the ADD says so itself.
    pub(crate) async fn status(&self, list: &List) -> Result<(), Error> {
        for plugin in &list.plugins {
            let asked = list.version.has_status_and_gc() || plugin::Kind::parse(kind(plugin)).is_some();
            if asked {
                match self.run(&self.general(Command::Status, list, plugin)).await {
                    Err(Error::RangeFull { .. } | Error::Plugin { code: TRY_AGAIN, .. }) | Ok(_) => {}
                    Err(error) => return Err(error),
                }
            } else {
                self.executables.find(kind(plugin))?;
            }
        }
        Ok(())
    }

    /// Tells plugins which attachments are valid, so that they free the rest: those that run in process, or those that
    /// are run as executables, and take their time. Our own are told in any version. All are told; the first error is
    /// returned. Nobody is when the list says that others attach to the network, too (`disableGC`).
    pub(crate) async fn gc(&self, list: &List, valid: &[Valid], of: Where) -> Result<(), Error> {
        let mut first = Ok(());
        let is_there = |plugin: &&Map<String, Value>| runs_in_process(plugin) == (of == Where::InProcess);
        let told = list.plugins.iter().filter(is_there).filter(|_| !list.disable_gc);
        for plugin in told {
            if list.version.has_status_and_gc() || plugin::Kind::parse(kind(plugin)).is_some() {
                let mut request = self.general(Command::Gc, list, plugin);
                request.set_valid_attachments(valid);
                first = first.and(self.run(&request).await.map(drop));
            }
        }
        first
    }

    /// What one plugin of the list is given.
    pub(crate) fn request(
        &self,
        command: Command,
        list: &List,
        plugin: &Map<String, Value>,
        (at, previous): (&Parameters, Option<Value>),
    ) -> Request {
        Request {
            command,
            container_id: at.container_id.clone(),
            netns: at.netns.clone(),
            ifname: at.ifname.clone(),
            args: at.args.clone(),
            path: self.executables.path.clone(),
            conf: list.derive(plugin, &at.capabilities, previous),
        }
    }

    fn general(&self, command: Command, list: &List, plugin: &Map<String, Value>) -> Request {
        let nobody = Parameters {
            container_id: String::new(),
            netns: None,
            ifname: String::new(),
            args: String::new(),
            capabilities: Capabilities::new(),
        };
        self.request(command, list, plugin, (&nobody, None))
    }

    async fn run(&self, request: &Request) -> Result<Option<Answer>, Error> {
        debug!(plugin = request.kind(), command = request.command.name(), id = request.container_id, "CNI");
        run(self.host, self.executables, request.kind(), request).await
    }
}

/// Whether all plugins of the list are our own: they run in process, and give back in any order.
pub(crate) fn is_own(list: &List) -> bool {
    list.kinds().all(|kind| plugin::Kind::parse(kind).is_some())
}

/// Whether the plugin is our own, and so is the one that gives addresses to it.
fn runs_in_process(plugin: &Map<String, Value>) -> bool {
    let own = |kind: &Value| {
        kind.as_str().is_some_and(|kind| kind.is_empty() || plugin::Kind::parse(kind).is_some())
    };
    let addresses = plugin.get("ipam").and_then(|ipam| ipam.get("type"));
    own(&kind(plugin).into()) && addresses.is_none_or(own)
}

fn kind(plugin: &Map<String, Value>) -> &str {
    plugin.get("type").and_then(Value::as_str).unwrap_or_default()
}

/// Runs one plugin of this type with this request. Also how a plugin asks another one for addresses
/// (section 4, "Plugin Delegation").
pub(crate) async fn run(
    host: &Host,
    executables: &Executables,
    kind: &str,
    request: &Request,
) -> Result<Option<Answer>, Error> {
    match plugin::Kind::parse(kind).filter(|_| is_own_here(host, executables, kind)) {
        Some(own) => Box::pin(plugin::run(host, executables, own, request)).await,
        None => executables.run(kind, request).await,
    }
}

/// Whether a plugin of this type is our own, and no executable of that name: one that is this program would do the
/// same as is done here, some milliseconds later.
pub(crate) fn is_own_here(host: &Host, executables: &Executables, kind: &str) -> bool {
    plugin::Kind::parse(kind).is_some() && (host.in_process() || executables.is_this_program(kind))
}

/// The versions that a plugin's answer to VERSION lists.
pub(crate) fn supported() -> Value {
    serde_json::json!({"cniVersion": Version::NEWEST.name(), "supportedVersions": Version::ALL.map(Version::name)})
}
