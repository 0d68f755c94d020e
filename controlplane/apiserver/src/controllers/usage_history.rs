//! Measures the containers of all nodes for the admission plugin InitialResources. Runs only with that plugin.

use std::{
    sync::{Arc, Weak},
    time::Duration,
};

use crate::{state::State, usage, usage_history::UsageHistory};

/// Time between two measurements. This interval is shorter than the lifetime of a sample. So each sample is also the
/// start of the next rate, and one request per node and interval suffices.
const INTERVAL: Duration = Duration::from_secs(50);

/// Measures until the server ends.
pub(crate) async fn record(state: Weak<State>, history: Arc<UsageHistory>) {
    let Some(shutdown) = state.upgrade().map(|state| state.shutdown.clone()) else { return };
    loop {
        tokio::select! {
            // Both branches only wait, so cancelling one of them loses nothing.
            () = tokio::time::sleep(INTERVAL) => {}
            () = shutdown.cancelled() => return,
        }
        let Some(state) = state.upgrade() else { return };
        usage::record(&state, &history).await;
    }
}
