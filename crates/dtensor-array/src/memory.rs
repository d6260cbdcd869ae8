//! Counts the bytes of live arrays, by purpose.

use std::sync::Arc;

use parking_lot::Mutex;

/// What an array is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Purpose {
    /// Activations, and everything else.
    Other,
    /// The value of a parameter.
    Parameter,
    /// The gradient of a parameter.
    Gradient,
    /// The state of an optimizer.
    OptimizerState,
    /// The gathered value of a sharded parameter.
    Gathered,
}

/// Peak bytes of live arrays: in all, and for each purpose by itself. The peaks of two purposes may be at different times.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct MemoryPeaks {
    /// All arrays together.
    pub total: usize,
    /// Values of parameters.
    pub parameters: usize,
    /// Gradients of parameters.
    pub gradients: usize,
    /// Optimizer state.
    pub optimizer: usize,
    /// Gathered values of sharded parameters.
    pub gathered: usize,
    /// Activations, and everything else.
    pub other: usize,
}

const PURPOSES: usize = 5;

#[derive(Debug, Default)]
struct Counts {
    live: [usize; PURPOSES],
    peaks: [usize; PURPOSES],
    total_peak: usize,
}

impl Counts {
    fn add(&mut self, purpose: usize, bytes: usize) {
        self.live[purpose] += bytes;
        self.peaks[purpose] = self.peaks[purpose].max(self.live[purpose]);
        self.total_peak = self.total_peak.max(self.live.iter().sum());
    }
}

/// The count of one recording.
type Account = Arc<Mutex<Counts>>;

crate::mode! {
    static RECORDING: Cell<bool> = false;
    static ACCOUNT: RefCell<Option<Account>> = None;
}

/// Runs `body` and counts the bytes of the arrays that this thread creates in it, from their creation until they are freed.
///
/// An array that another thread created, such as the result of a collective of threads, counts for the thread that last said
/// [what it is for](crate::Array::count_as).
///
/// ```
/// use dtensor_array::memory::record;
/// use dtensor_array::Array;
/// # fn main() -> dtensor_array::Result<()> {
/// let (kept, peaks) = record(|| {
///     drop(Array::from_vec(vec![0f32; 100], &[100])?);
///     Array::from_vec(vec![0f32; 10], &[10])
/// });
/// assert_eq!((peaks.total, kept?.numel()), (400, 10));
/// # Ok(())
/// # }
/// ```
pub fn record<R>(body: impl FnOnce() -> R) -> (R, MemoryPeaks) {
    let account = Account::default();
    let result = RECORDING.within(true, || ACCOUNT.within(Some(account.clone()), body));
    let Counts { peaks, total_peak, .. } = &*account.lock();
    let peak = |purpose: Purpose| peaks[purpose as usize];
    let peaks = MemoryPeaks {
        total: *total_peak,
        parameters: peak(Purpose::Parameter),
        gradients: peak(Purpose::Gradient),
        optimizer: peak(Purpose::OptimizerState),
        gathered: peak(Purpose::Gathered),
        other: peak(Purpose::Other),
    };
    (result, peaks)
}

/// The entry of one storage in the account of the recording that it was created in, if any.
#[derive(Debug, Default)]
pub(crate) struct Charge(Option<Box<Entry>>);

#[derive(Debug)]
struct Entry {
    bytes: usize,
    /// Whose account it is in, as what.
    charged: Mutex<(Account, Purpose)>,
}

impl Drop for Entry {
    fn drop(&mut self) {
        let (account, purpose) = self.charged.get_mut();
        account.lock().live[*purpose as usize] -= self.bytes;
    }
}

impl Charge {
    /// Charges bytes to the recording that runs on this thread, if any.
    #[inline]
    pub(crate) fn new(bytes: usize) -> Self {
        if RECORDING.get() { Charge::recorded(bytes) } else { Charge(None) }
    }

    #[cold]
    fn recorded(bytes: usize) -> Self {
        let entry = |account: Account| {
            account.lock().add(Purpose::Other as usize, bytes);
            Box::new(Entry { bytes, charged: Mutex::new((account, Purpose::Other)) })
        };
        Charge(ACCOUNT.get().map(entry))
    }

    /// Changes the purpose, and moves the bytes to the recording that runs on this thread, if any.
    pub(crate) fn count_as(&self, purpose: Purpose) {
        let Some(entry) = &self.0 else { return };
        let mut charged = entry.charged.lock();
        let (account, before) = &mut *charged;
        account.lock().live[*before as usize] -= entry.bytes;
        if let Some(other) = ACCOUNT.get() {
            *account = other;
        }
        *before = purpose;
        account.lock().add(purpose as usize, entry.bytes);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Array;

    #[test]
    fn peaks_are_counted_by_purpose() {
        let array = |n: usize| Array::from_vec(vec![0f64; n], &[n]).unwrap();
        let before = array(1000);
        let (kept, peaks) = record(|| {
            let (a, b) = (array(4), array(2));
            a.count_as(Purpose::Gathered);
            let view = a.narrow(0, 1, 2).unwrap();
            drop(a);
            let c = array(1);
            drop(view); // frees `a`
            c.count_as(Purpose::Parameter);
            drop(before.clone());
            drop((b, array(3)));
            c
        });
        // `a`, `b` and `c` were alive together.
        assert_eq!(peaks.total, 56);
        assert_eq!((peaks.gathered, peaks.parameters, peaks.other), (32, 8, 48));
        // What lives longer than the recording is counted until it is freed.
        let charged = kept.clone();
        drop((kept, charged, before));
        let ((), nothing) = record(|| ());
        assert_eq!(nothing, MemoryPeaks::default());
    }
}
