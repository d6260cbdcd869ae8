//! The one place where ranks that are threads write to memory they share. It is small, so it can be run by an interpreter that
//! sees every read of what was not written, every race and every leak: this file needs nothing but the standard library.
#![allow(unsafe_code)]

#[path = "../src/host/shared.rs"]
mod shared;

use std::ops::Range;
use std::sync::atomic::{AtomicUsize, Ordering};

use shared::Shared;

/// Cuts `len` into `parts` ranges, some of them empty if there are more parts than elements.
fn cut(len: usize, parts: usize) -> Vec<Range<usize>> {
    (0..parts).map(|i| len * i / parts..len * (i + 1) / parts).collect()
}

fn fill<T: Copy>(room: &Shared<T>, range: Range<usize>, value: impl Fn(usize) -> T) {
    // SAFETY: in every test ranges that are in use at the same time come from one `cut`, or from one thread, and nothing is
    // taken before they are written.
    let out = unsafe { room.range(range.clone()) };
    for (x, i) in out.iter_mut().zip(range) {
        x.write(value(i));
    }
}

fn take<T: Copy>(room: &Shared<T>) -> Option<Vec<T>> {
    // SAFETY: tests take what is written as a whole, by threads that have ended or been waited for.
    unsafe { room.take() }
}

fn written_by_threads<T: Copy + Send + PartialEq + std::fmt::Debug>(value: impl Fn(usize) -> T + Sync) {
    for (len, threads) in [(1, 1), (2, 2), (7, 3), (64, 4), (3, 5), (0, 2)] {
        let room = Shared::new(len).expect("there is so much memory");
        std::thread::scope(|scope| {
            for range in cut(len, threads) {
                let (room, value) = (&room, &value);
                scope.spawn(move || fill(room, range, value));
            }
        });
        let data = take(&room).expect("it is there");
        assert_eq!(data, (0..len).map(&value).collect::<Vec<_>>());
        assert_eq!(take(&room), None, "handed out twice");
        drop(room);
        assert_eq!(data.len(), len, "what was handed out goes on");
    }
}

#[test]
fn what_several_threads_write_is_one_vector() {
    written_by_threads(|i| i as u8);
    written_by_threads(|i| i as f64 / 3.0);
    written_by_threads(|i| (i as u8, i as u64));
    written_by_threads(|_| ());
}

#[test]
fn whoever_writes_last_takes_it() {
    // As the ranks of a meeting do it: they take parts until there are no more, and the one that finishes the last part
    // takes the whole.
    for round in 0..if cfg!(miri) { 8 } else { 200 } {
        let (len, parts) = (100, cut(100, 9));
        let room = Shared::new(len).expect("there is so much memory");
        let (next, done) = (AtomicUsize::new(0), AtomicUsize::new(0));
        let work = || {
            let mut whole = None;
            while let Some(range) = parts.get(next.fetch_add(1, Ordering::SeqCst)) {
                fill(&room, range.clone(), |i| i + round);
                if done.fetch_add(1, Ordering::SeqCst) + 1 == parts.len() {
                    whole = take(&room);
                    // It sees what all have written, not only those who wait for it.
                    assert_eq!(whole, Some((round..round + len).collect()));
                }
            }
            whole
        };
        let got: Vec<Vec<usize>> = std::thread::scope(|scope| {
            let threads = [(); 3].map(|()| scope.spawn(work));
            threads.into_iter().filter_map(|thread| thread.join().expect("it has not panicked")).collect()
        });
        assert_eq!(got.len(), 1, "one of them takes it");
    }
}

#[test]
fn it_is_handed_out_once_however_many_ask() {
    let room = Shared::new(10).expect("there is so much memory");
    fill(&room, 0..10, |i| i as u32);
    let got: Vec<Vec<u32>> = std::thread::scope(|scope| {
        let threads = [(); 4].map(|()| scope.spawn(|| take(&room)));
        threads.into_iter().filter_map(|thread| thread.join().expect("it has not panicked")).collect()
    });
    assert_eq!(got, [(0..10).collect::<Vec<u32>>()]);
}

#[test]
fn what_nobody_takes_is_given_back() {
    for len in [0, 1, 1000] {
        // Not written, partly written, written; on this thread and on another.
        for written in [0, len / 2, len] {
            let room = Shared::new(len).expect("there is so much memory");
            fill(&room, 0..written, |i| i as u64);
            drop(room);
            let room = Shared::new(len).expect("there is so much memory");
            fill(&room, len - written..len, |i| i as u64);
            std::thread::spawn(move || drop(room)).join().expect("it has not panicked");
        }
    }
}

#[test]
fn a_range_may_be_written_again_and_grow_no_further_than_the_end() {
    let room = Shared::new(5).expect("there is so much memory");
    fill(&room, 0..5, |_| 1u8);
    fill(&room, 2..4, |_| 2);
    fill(&room, 5..5, |_| 3);
    for (start, end) in [(0, 6), (6, 6), (4, 2), (usize::MAX, 0)] {
        let outside =
            std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| fill(&room, start..end, |_| 4)));
        assert!(outside.is_err(), "{start}..{end} of 5 was handed out");
    }
    assert_eq!(take(&room), Some(vec![1, 1, 2, 2, 1]));
}

#[test]
fn more_than_there_can_be_is_refused() {
    assert!(Shared::<u64>::new(usize::MAX / 4).is_none());
    assert!(Shared::<u8>::new(usize::MAX).is_none());
    assert_eq!(format!("{:?}", Shared::<u64>::new(3)), "Some(Shared(3 elements))");
}
