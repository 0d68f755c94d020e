//! Choice of the network: the first list of the configuration directory, or the default network. Watches the
//! directory.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use tracing::{info, warn};

use super::{Network, State};
use crate::error::Error;
use crate::spec::list::List;
use crate::watch::Watch;

/// Delay before the configuration is read and watched again after a failure.
const RETRY_DELAY: Duration = Duration::from_secs(10);

impl Network {
    /// Reads the configuration directory again. Existing attachments do not change.
    pub(super) async fn reload(&self) {
        let Some(dir) = &self.inner.config.conf_dir else { return };
        let found = List::first_of(dir);
        let mut state = self.inner.state.write().await;
        let taken = match found {
            Ok(Some(list)) => self.install(&mut state, list).await,
            // If the directory does not exist, this function is called after each change of its nearest existing
            // parent.
            Ok(None) if !state.configured && !state.unusable => return,
            Ok(None) => self.install_default(&mut state).await,
            Err(error) => Err(error),
        };
        state.unusable = taken.is_err();
        if let Err(error) = taken {
            warn!(error = error.chain(), "cannot use the network configuration");
            self.set_ready(Err(error.chain()));
        }
    }

    async fn install(&self, state: &mut State, list: List) -> Result<(), Error> {
        let of_others = list.kinds().filter(|kind| crate::plugin_kind::Kind::parse(kind).is_none());
        let of_others = of_others.map(str::to_owned).collect();
        let is_new = state.list.as_deref() != Some(&list);
        if is_new {
            info!(network = list.name, "using the network of a configuration list");
        }
        if !state.configured {
            self.drop_default()?;
        }
        state.configured = true;
        state.list = Some(Arc::new(list));
        self.set_ready(Ok(of_others));
        // Another runtime, or an earlier start, may have left attachments of a network with this name. A failure does
        // not prevent new attachments.
        if is_new
            && state.unrecorded.is_some()
            && let Err(error) = self.derive(state).await
        {
            warn!(error = error.chain(), "cannot restore the network of running pods");
        }
        Ok(())
    }

    /// Reloads after each change of the configuration directory, as long as the network exists.
    pub(super) fn watch(&self) {
        let inner = &self.inner;
        let Some(dir) = inner.config.conf_dir.clone() else { return };
        let network = self.weak();
        let watching = tokio::spawn(async move {
            let (mut logged, mut last_found) = (false, None);
            loop {
                let Err(error) = reload_on_change(&dir, &network, &mut last_found).await else { return };
                if !std::mem::replace(&mut logged, true) {
                    let seconds = RETRY_DELAY.as_secs();
                    warn!(%error, seconds, "cannot watch the network configuration, reading it periodically");
                }
                tokio::time::sleep(RETRY_DELAY).await;
            }
        });
        let mut tasks = inner.tasks.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        tasks.push(watching.abort_handle());
    }
}

/// Reloads after each change. Returns Ok when the network is dropped, and an error when the directory cannot be
/// watched. `last_found` is the configuration at the last such error; an equal configuration is not reloaded.
async fn reload_on_change(
    dir: &Path,
    network: &impl Fn() -> Option<Network>,
    last_found: &mut Option<String>,
) -> std::io::Result<()> {
    let mut watch = match Watch::on(dir) {
        Ok(watch) => watch,
        Err(error) => {
            let found = Some(format!("{:?}", List::first_of(dir)));
            if *last_found != found {
                let Some(network) = network() else { return Ok(()) };
                network.reload().await;
                *last_found = found;
            }
            return Err(error);
        }
    };
    loop {
        // Changes before the watch began are found now.
        let Some(network) = network() else { return Ok(()) };
        network.reload().await;
        drop(network);
        watch.changed().await?;
    }
}
