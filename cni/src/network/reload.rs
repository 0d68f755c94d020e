//! Which network is the network: the first list of the configuration directory, or the default one; and
//! noticing that this changed.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use tracing::{info, warn};

use super::{Network, State};
use crate::error::Error;
use crate::spec::list::List;
use crate::watch::Watch;

/// How long after a failure the configuration is looked at and watched again.
const PAUSE: Duration = Duration::from_secs(10);

impl Network {
    /// Reads the configuration directory anew. Attachments that were made stay what they are.
    pub(super) async fn reload(&self) {
        let Some(dir) = &self.inner.config.conf_dir else { return };
        let found = List::first_of(dir);
        let mut state = self.inner.state.write().await;
        let taken = match found {
            Ok(Some(list)) => self.install(&mut state, list).await,
            // Where there is no such directory, this comes after every change of what is above it.
            Ok(None) if !state.configured && !state.unusable => return,
            Ok(None) => self.install_default(&mut state).await,
            Err(error) => Err(error),
        };
        state.unusable = taken.is_err();
        if let Err(error) = taken {
            warn!(error = error.chain(), "the network configuration cannot be used");
            self.set_ready(Err(error.chain()));
        }
    }

    async fn install(&self, state: &mut State, list: List) -> Result<(), Error> {
        let of_others = list.kinds().filter(|kind| crate::plugin::Kind::parse(kind).is_none());
        let of_others = of_others.map(str::to_owned).collect();
        let is_new = state.list.as_deref() != Some(&list);
        if is_new {
            info!(network = list.name, "the network is that of a configuration list");
        }
        if !state.configured {
            self.drop_default()?;
        }
        state.configured = true;
        state.list = Some(Arc::new(list));
        self.set_ready(Ok(of_others));
        // What another runtime, or we in an earlier life, left of a network of its name. Pods can be attached all the same.
        if is_new
            && state.unowned.is_some()
            && let Err(error) = self.derive(state).await
        {
            warn!(error = error.chain(), "the network is not all that the living pods need");
        }
        Ok(())
    }

    /// Reloads after every change of the configuration directory, for as long as the network is.
    pub(super) fn watch(&self) {
        let inner = &self.inner;
        let Some(dir) = inner.config.conf_dir.clone() else { return };
        let network = self.weak();
        let watching = tokio::spawn(async move {
            let (mut told, mut seen) = (false, None);
            loop {
                let Err(error) = heed(&dir, &network, &mut seen).await else { return };
                if !std::mem::replace(&mut told, true) {
                    let seconds = PAUSE.as_secs();
                    warn!(%error, seconds, "the network configuration cannot be watched: it is looked at now and then");
                }
                tokio::time::sleep(PAUSE).await;
            }
        });
        let mut tasks = inner.tasks.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        tasks.push(watching.abort_handle());
    }
}

/// Reloads after every change. Ok when the network is no more, an error when changes are not told any more.
async fn heed(
    dir: &Path,
    network: &impl Fn() -> Option<Network>,
    seen: &mut Option<String>,
) -> std::io::Result<()> {
    let mut watch = match Watch::on(dir) {
        Ok(watch) => watch,
        Err(error) => {
            let found = Some(format!("{:?}", List::first_of(dir)));
            if *seen != found {
                let Some(network) = network() else { return Ok(()) };
                network.reload().await;
                *seen = found;
            }
            return Err(error);
        }
    };
    loop {
        // What happened before it was watched is seen now.
        let Some(network) = network() else { return Ok(()) };
        network.reload().await;
        drop(network);
        watch.changed().await?;
    }
}
