/* SPDX-License-Identifier: Apache-2.0
 *
 * How machines with a disk of their own each commit one save on all of them, for spin, and what a later job takes from
 * there: in every order, ranks die between any two steps, and a prune of the first disk runs whenever it likes.
 *
 * Each machine has one rank, which commits on its disk; that of machine 0 coordinates. All begin, and sweep what no
 * mark in the folder of the step names. All write their files. When all have said so, the coordinator puts its mark,
 * and says so; then each other rank puts its own. When all have, each notes on its disk that all have, and the save is
 * reported. Then each other disk removes the steps that the first one had before, and has no more.
 *
 * A prune removes steps from the first disk that are older than the newest one with a note. A job ends when one of its
 * ranks dies: the others die as well, each whenever it is its turn. A new job takes the newest save whose mark is on
 * all disks, with all files, and goes on behind its step: so it comes to the name of a step that it could not take.
 *
 * test_near_commit_model.py runs this file; docs/internals/architecture.md says what it shows.
 *
 *   M      machines, 2 or 3
 *   SAVES  2 to 4; save 0 was reported before all this
 *   JOBS   that follow the first one
 *   PRUNES how often the first disk is pruned
 *   CORRUPT  1: a prune also removes older steps without a note
 *   M_...  a mutation: the code as it must not be, or a use that has no promise
 *
 * Left out: how a mark is put on one disk, and what a power cut leaves of it (commit.pml); lost disks, which cost all
 * steps that they have a part of; several ranks of a machine.
 */
#ifndef M
#define M 2
#endif
#ifndef SAVES
#define SAVES 4
#endif
#ifndef JOBS
#define JOBS 2
#endif
#ifndef PRUNES
#define PRUNES 2
#endif
#ifndef CORRUPT
#define CORRUPT 0
#endif

#define BIT(n) (1 << (n))
#define HAS(set, n) (((set) >> (n)) & 1)
#define ALL ((1 << M) - 1)
#define NONE SAVES

#define MUST(property, x) assert((x) || (property) == 0)
#define NEWEST 1 /* what was reported last is taken, or a newer one */
#define WHOLE 2  /* what is taken has its files on all disks */

byte mark[M * SAVES]; /* of each disk and step: the save; NONE for no mark */
byte note[M * SAVES]; /* the save that all have committed, as it is noted there */
byte file[M];         /* of each disk: the saves whose file is there */
#define MARK(d, n) mark[(d) * SAVES + (n)]
#define NOTE(d, n) note[(d) * SAVES + (n)]

byte name[SAVES];     /* the step of each save */
byte save;            /* the one under way */
byte begun, written, marked, ended;
byte alive;
byte before;          /* the steps that the first disk had when the coordinator last looked */
byte now;
byte reported;
byte taken;
byte jobs;
byte prunes;
hidden byte x, y, newest;

#define IS_THERE(d, n) (MARK(d, n) != NONE)
#define DIES :: atomic { jobs < JOBS -> goto dies }
#define SOMEBODY_DIED (alive != ALL)

#if defined(M_MARK_EARLY) /* the coordinator waits for no file but its own */
#define MAY_MARK_FIRST (HAS(written, 0))
#else
#define MAY_MARK_FIRST (written == ALL)
#endif
#if defined(M_REPORT_EARLY) /* the save is reported with the mark of the coordinator */
#define MAY_REPORT (marked != 0)
#else
#define MAY_REPORT (marked == ALL)
#endif

/* Removes a step from a disk: the mark first. */
inline removes(d, n) {
  NOTE(d, n) = NONE;
  if
  :: MARK(d, n) != NONE -> file[d] = file[d] & ~BIT(MARK(d, n)); MARK(d, n) = NONE
  :: else -> skip
  fi
}

proctype Rank(byte r) {
  byte n;
begins:
  atomic {
    if
    :: save == SAVES -> goto done
    :: else -> n = name[save]
    fi
  }
  if
  DIES
  :: SOMEBODY_DIED -> goto dies
  :: d_step { /* what is in the folder, and no mark names */
       !SOMEBODY_DIED ->
       x = 0;
       do
       :: x < SAVES ->
          if
          :: name[x] == n && x != save && MARK(r, n) != x -> file[r] = file[r] & ~BIT(x)
          :: else -> skip
          fi;
          x++
       :: else -> break
       od;
       x = 0;
       begun = begun | BIT(r)
     }
  fi;
  if
  DIES
  :: SOMEBODY_DIED -> goto dies
  :: begun == ALL -> skip
  fi;
  if
  DIES
  :: atomic { true -> file[r] = file[r] | BIT(save) }
  fi;
  if
  DIES
  :: atomic { true -> written = written | BIT(r) }
  fi;
  if
  DIES
  :: SOMEBODY_DIED -> goto dies
  :: r == 0 && MAY_MARK_FIRST -> skip
  :: r != 0 && HAS(marked, 0) -> skip
  fi;
  if
  DIES
  :: d_step { /* the mark, and then the files of the one that it replaces */
       true ->
       if
       :: MARK(r, n) != NONE && MARK(r, n) != save -> file[r] = file[r] & ~BIT(MARK(r, n))
       :: else -> skip
       fi;
       MARK(r, n) = save;
#if defined(M_NOTE_EARLY) /* with the mark, whatever others have */
       NOTE(r, n) = save;
#endif
     }
  fi;
  if
  DIES
  :: atomic { true -> marked = marked | BIT(r) }
  fi;
  if
  DIES
  :: SOMEBODY_DIED && !MAY_REPORT -> goto dies
  :: MAY_REPORT -> skip
  fi;
  if
  DIES
  :: atomic { true -> NOTE(r, n) = save }
  fi;
  if
  DIES
  :: atomic { true -> reported = save }
  fi;
  if
  DIES
  :: d_step { /* the coordinator looks which steps are there */
       r == 0 ->
       x = 0;
       now = 0;
       do
       :: x < SAVES -> now = now | (IS_THERE(0, x) << x); x++
       :: else -> break
       od;
       x = 0;
       ended = ended | BIT(0)
     }
  :: SOMEBODY_DIED && !HAS(ended, 0) -> goto dies
  :: d_step { /* another disk removes what is gone from there */
       r != 0 && HAS(ended, 0) ->
       x = 0;
       do
       :: x < SAVES ->
          if
          :: HAS(before, x) && !HAS(now, x) -> removes(r, x)
          :: else -> skip
          fi;
          x++
       :: else -> break
       od;
       x = 0;
       ended = ended | BIT(r)
     }
  fi;
  if
  DIES
  :: SOMEBODY_DIED -> goto dies
  :: atomic { ended == ALL && r == 0 ->
       before = now;
       begun = 0; written = 0; marked = 0;
       save++;
       if
       :: save < SAVES ->
#if defined(M_SAME_STEP) /* a run that saves over one step again and again */
          name[save] = name[save - 1]
#else
          name[save] = name[save - 1] + 1
#endif
       :: else -> skip
       fi;
       ended = 0
     }
  :: atomic { ended == 0 && r != 0 -> skip }
  fi;
  goto begins;
dies:
  atomic { alive = alive & ~BIT(r); goto gone };
done:
  atomic { jobs = JOBS; alive = alive & ~BIT(r) };
gone:
  skip
}

/* The newest of the steps that count for a prune, by when they were saved. */
#if defined(M_PRUNE_MARKED) /* whoever has a mark on the first disk */
#define COUNTS(n) IS_THERE(0, n)
#else
#define COUNTS(n) (IS_THERE(0, n) && NOTE(0, n) == MARK(0, n))
#endif

proctype Prune() {
end:
  do
  :: d_step {
       prunes < PRUNES ->
       prunes++;
       newest = NONE;
       x = 0;
       do
       :: x < SAVES ->
          if
          :: COUNTS(x) && (newest == NONE || MARK(0, x) > newest) -> newest = MARK(0, x)
          :: else -> skip
          fi;
          x++
       :: else -> break
       od;
       x = 0;
       do
       :: x < SAVES && newest != NONE ->
          if
          :: IS_THERE(0, x) && MARK(0, x) < newest && (COUNTS(x) || CORRUPT) -> removes(0, x)
          :: else -> skip
          fi;
          x++
       :: else -> break
       od;
       x = 0;
       newest = 0
     }
  od
}

/* The newest save whose mark is on all disks. */
#if defined(M_TAKE_FIRST) /* whose mark is on the first disk */
#define IS_COMMITTED(n) IS_THERE(0, n)
#elif M == 2
#define IS_COMMITTED(n) (IS_THERE(0, n) && MARK(1, n) == MARK(0, n))
#else
#define IS_COMMITTED(n) (IS_THERE(0, n) && MARK(1, n) == MARK(0, n) && MARK(2, n) == MARK(0, n))
#endif
#if M == 2
#define IS_WHOLE(s) (HAS(file[0], s) && HAS(file[1], s))
#else
#define IS_WHOLE(s) (HAS(file[0], s) && HAS(file[1], s) && HAS(file[2], s))
#endif

inline takes() {
  d_step {
    taken = NONE;
    x = 0;
    do
    :: x < SAVES ->
       if
       :: IS_COMMITTED(x) && (taken == NONE || MARK(0, x) > taken) -> taken = MARK(0, x)
       :: else -> skip
       fi;
       x++
    :: else -> break
    od;
    x = 0;
    MUST(NEWEST, taken != NONE && taken >= reported);
    MUST(WHOLE, taken == NONE || IS_WHOLE(taken))
  }
}

inline begins_job() {
  y = 0;
  do
  :: y < M -> run Rank(y); y++
  :: else -> break
  od;
  y = 0
}

init {
  atomic {
    x = 0;
    do
    :: x < M * SAVES -> mark[x] = NONE; note[x] = NONE; x++
    :: else -> break
    od;
    x = 0;
    do
    :: x < M -> MARK(x, 0) = 0; NOTE(x, 0) = 0; file[x] = 1; x++
    :: else -> break
    od;
    x = 0;
    save = 1;
#if defined(M_SAME_STEP)
    name[1] = 0;
#else
    name[1] = 1;
#endif
    before = 1;
    alive = ALL;
    run Prune();
    begins_job()
  };
  do
  :: atomic { alive == 0 && jobs < JOBS && _nr_pr == 2 ->
       jobs++;
       takes();
       if /* each save has a number of its own; the job goes on behind the step that it took */
       :: save < SAVES - 1 ->
          save++;
#if defined(M_SAME_STEP)
          name[save] = name[taken]
#else
          name[save] = name[taken] + 1
#endif
       :: else -> save = SAVES
       fi;
       begun = 0; written = 0; marked = 0; ended = 0; before = 0;
       alive = ALL;
       begins_job()
     }
  :: atomic { alive == 0 && jobs == JOBS && _nr_pr == 2 -> takes(); break }
  od
}
